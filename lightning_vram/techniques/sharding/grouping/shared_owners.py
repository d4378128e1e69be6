"""Keep parameters that several modules use in one sharding group.

FSDP2 refuses a parameter that two groups have, and would leave one that lies half in a group and half outside as two
parameters. Here the modules that have it become a group of their own, inside of whatever they lie in: an embedding and
the head that is tied to it, one layer that all blocks call. Where that cannot be, since one of them is read and not
called, the groups are joined, or given up to the next outer one.
"""

from collections import defaultdict
from collections.abc import Iterator

from torch import nn

Group = list[nn.Module]
_OUTSIDE = -1  # of all groups


def separate_shared_owners(
    root: nn.Module, groups: list[Group], fixed: set[nn.Module], skipped: set[nn.Module]
) -> None:
    """Change ``groups`` in place so that every parameter lies in one.

    Args:
        root: The whole model.
        groups: Modules that are sharded together. They may be nested; the inner one then has its parameters.
        fixed: Modules that cannot be in a group but as a part of another module.
        skipped: Modules to leave alone.
    """
    given_up = {root, *fixed}
    while True:
        homes = _find_homes(root, groups, skipped)
        owners = _find_conflict(homes)
        if not owners:
            return
        if given_up.isdisjoint(owners):
            _gather(groups, owners)
            continue
        indices = set().union(*(homes[owner] for owner in owners))
        inside = [index for index in sorted(indices) if index != _OUTSIDE]
        joined = [module for index in inside for module in groups[index]]
        for index in reversed(inside):
            del groups[index]
        if _OUTSIDE in indices:
            given_up.update(joined)
        else:
            groups.append(_outermost(joined))


def count_own_params(root: nn.Module, groups: list[Group], skipped: set[nn.Module]) -> list[int]:
    """Count the elements of each group that no inner group has; arguments as of :func:`separate_shared_owners`."""
    parameters: dict[int, set[nn.Parameter]] = defaultdict(set)
    for module, indices in _find_homes(root, groups, skipped).items():
        for index in indices:
            parameters[index].update(module.parameters(recurse=False))
    return [sum(parameter.numel() for parameter in parameters[index]) for index in range(len(groups))]


def _find_homes(root: nn.Module, groups: list[Group], skipped: set[nn.Module]) -> dict[nn.Module, set[int]]:
    """Return the groups that each module belongs to: one, if it is not shared."""
    units = {module: index for index, group in enumerate(groups) for module in group}
    homes: dict[nn.Module, set[int]] = defaultdict(set)
    for start, index in {root: _OUTSIDE, **units}.items():
        waiting = [start]
        while waiting:
            module = waiting.pop()
            if index in homes[module]:
                continue
            homes[module].add(index)
            waiting += [child for child in module.children() if child not in units and child not in skipped]
    return homes


def _find_conflict(homes: dict[nn.Module, set[int]]) -> Group:
    """Return modules with parameters in common that lie in different groups; a whole shared module if there is one."""
    for module, indices in homes.items():
        if len(indices) > 1 and any(True for _ in module.parameters()):
            return [module]
    owners: dict[nn.Parameter, Group] = defaultdict(list)
    for module in homes:
        for parameter in set(module.parameters(recurse=False)):
            owners[parameter].append(module)
    for sharing in owners.values():
        if len(set().union(*(homes[owner] for owner in sharing))) > 1:
            return _with_linked(sharing, owners)
    return []


def _with_linked(sharing: Group, owners: dict[nn.Parameter, Group]) -> Group:
    """Add the modules that have other parameters in common with these."""
    found = dict.fromkeys(sharing)
    waiting = list(sharing)
    while waiting:
        for parameter in waiting.pop().parameters(recurse=False):
            new = [owner for owner in owners[parameter] if owner not in found]
            found.update(dict.fromkeys(new))
            waiting += new
    return list(found)


def _gather(groups: list[Group], owners: Group) -> None:
    """Make one group of the owners, with all that they are grouped with already."""
    touched = [group for group in groups if not set(group).isdisjoint(owners)]
    groups[:] = [group for group in groups if group not in touched]
    groups.append(_outermost([*(module for group in touched for module in group), *owners]))


def _outermost(modules: Group) -> Group:
    distinct = list(dict.fromkeys(modules))
    inner = {part for one in distinct for part in one.modules() if part is not one}
    return [one for one in distinct if one not in inner]


def order_inner_first(groups: list[Group]) -> Iterator[Group]:
    """Yield ``groups`` so that those nested in others come before them; such as lie in one another become one."""
    parts = {id(group): {part for module in group for part in module.modules()} - set(group) for group in groups}
    waiting = list(groups)
    while waiting:
        free = [g for g in waiting if not any(parts[id(g)] & set(other) for other in waiting if other is not g)]
        if not free:
            yield _outermost([module for group in waiting for module in group])
            return
        yield from free
        waiting = [group for group in waiting if not any(group is one for one in free)]
