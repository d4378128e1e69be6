"""Plan which modules of a model FSDP2 shards together.

FSDP2 gathers one group at a time, when a module of it is called. A group for each block, large embedding and head keeps
little on the device; a group for each small layer costs more messages than it saves memory. What is in no group is
gathered with the whole model and stays for the whole step.
"""

import dis
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Literal

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import is_parametrized

from lightning_vram.core.tensors.properties import sharded_modules
from lightning_vram.private_names.torch import own_children, own_parameters

_ENTRIES = ("forward", "training_step", "validation_step", "test_step", "predict_step")
_ATTRIBUTE_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_HARMLESS = ("dtype", "is_meta", "ndim", "requires_grad", "shape")  # the same of a shard

Chain = tuple[str, ...]


def find_read_modules(root: nn.Module) -> set[nn.Module]:
    """Find modules that are not called, or not before their parameters are used.

    These are modules without a forward, parts of an ``nn.MultiheadAttention`` and of parametrizations, and modules
    whose parameters an outer forward or step names (``hidden @ self.embedding.weight.T``), where they would still be
    shards. The code is inspected, not run; reads by an index (``self.layers[0].weight``) or by ``getattr`` are missed.
    """
    read = {
        module
        for module in root.modules()
        if type(module).forward is nn.Module.forward and "forward" not in vars(module)  # ModuleList and such
    }
    for path, rest in _iterate_chains(root):
        owner, name = path[-1], rest[0]
        is_parameter = name in own_parameters(owner) or is_parametrized(owner, name)
        if is_parameter and not (len(rest) > 1 and rest[1] in _HARMLESS):
            read.update(path)
    for module in root.modules():
        if isinstance(module, nn.MultiheadAttention):
            read.update(part for part in module.modules() if part is not module)
        elif is_parametrized(module):
            read.update(module.parametrizations.modules())  # type: ignore[union-attr]
    return read


def find_entered_modules(root: nn.Module) -> set[nn.Module]:
    """Find modules of which an outer forward or step calls another method than ``forward``."""
    return {
        path[-1]
        for path, (name, *_) in _iterate_chains(root)
        if not hasattr(nn.Module, name) and inspect.isfunction(getattr(type(path[-1]), name, None))
    }


def _iterate_chains(root: nn.Module) -> Iterator[tuple[list[nn.Module], Chain]]:
    """Yield modules along each chain of attributes in a module's code (``self.a.b``), and the rest of the chain."""
    known: dict[type, set[Chain]] = {}
    for module in root.modules():
        kind = type(module)
        if kind not in known:
            known[kind] = read_chains(kind)
        followed = (follow_chain(module, chain[start:]) for chain in known[kind] for start in range(len(chain)))
        yield from ((path, rest) for path, rest in followed if path and rest)


def read_chains(kind: type) -> set[Chain]:
    """Return the chains of attributes in the entries of a class of modules, and in the methods that they name."""
    chains: set[Chain] = set()
    waiting, seen = list(_ENTRIES), set(_ENTRIES)
    while waiting:
        attribute: Any = getattr(kind, waiting.pop(), None)
        function = inspect.unwrap(attribute) if callable(attribute) else None
        found = set(_chains_of(function.__code__)) if inspect.isfunction(function) else set()
        chains |= found
        called = {name for chain in found for name in chain if not hasattr(nn.Module, name)} - seen
        called = {name for name in called if callable(inspect.getattr_static(kind, name, None))}
        seen |= called
        waiting += called
    return chains


def _chains_of(code: CodeType) -> Iterator[Chain]:
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in _ATTRIBUTE_LOADS:
            chain.append(instruction.argval)
            continue
        if chain:
            yield tuple(chain)
        chain = []
    for inner in code.co_consts:  # functions within, comprehensions
        if isinstance(inner, CodeType):
            yield from _chains_of(inner)


def follow_chain(module: nn.Module, chain: Chain) -> tuple[list[nn.Module], Chain]:
    """Return the modules along a chain, and the rest of it."""
    path: list[nn.Module] = []
    for position, name in enumerate(chain):
        child = own_children(module).get(name)
        if child is None:
            return path, chain[position:]
        module = child
        path.append(module)
    return path, ()


Wrap = Literal["auto"] | Sequence[str | type[nn.Module]] | Callable[[str, nn.Module], bool]
_MIN_PARAMS = 1_000_000


@dataclass(frozen=True)
class ShardingPlan:
    """What to call ``fully_shard`` with.

    Attributes:
        groups: Names of modules, one tuple per call, nested groups first; the root, sharded last, is in none.
        replicated: All names of parameters without a dimension or elements, which FSDP2 cannot shard.
    """

    groups: tuple[tuple[str, ...], ...]
    replicated: tuple[str, ...]


def plan_sharding_groups(module: nn.Module, wrap: Wrap = "auto", *, min_params: int = _MIN_PARAMS) -> ShardingPlan:
    """Plan the FSDP2 groups of ``module``, the same on all ranks if the model is.

    Parts that are already sharded are skipped. Modules that share a parameter are in one group. A module of
    :func:`find_read_modules` is never a group on its own.

    Args:
        module: The whole model; its parameters may be on ``meta``.
        wrap: ``"auto"``: the blocks that a model repeats or declares, small ones merged, and other large parts. Or
            classes or class names: all such modules. Or a function of name and module, asked for modules that can be a
            group.
        min_params: Smallest number of elements in a group of ``"auto"``, which makes none in models of less than twice
            it.

    Raises:
        TypeError: If ``wrap`` is none of these.
        ValueError: If ``wrap`` matches nothing or what cannot be a group, ``min_params`` is not positive, or the model
            has parameters without a shape, or expanded ones.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> plan_sharding_groups(model, min_params=50)
        ShardingPlan(groups=(('0',), ('2',)), replicated=())
    """
    _check(module, wrap, min_params)
    names = {part: name for name, part in module.named_modules()}
    skipped = {inner for part in sharded_modules(module) for inner in part.modules()}
    read = find_read_modules(module)
    if module in skipped:
        groups = []
    elif isinstance(wrap, str):
        groups = _plan_alone(module, min_params, read, skipped)
    else:
        chosen = _choose(wrap, names, read)
        groups = [[part] for part in chosen if part not in skipped]
        separate_shared_owners(module, groups, read, skipped)
    order = {part: position for position, part in enumerate(names)}
    groups = [sorted(group, key=order.__getitem__) for group in groups]
    groups.sort(key=lambda group: order[group[0]])
    named = tuple(tuple(names[part] for part in group) for group in order_inner_first(groups))
    return ShardingPlan(named, _name_unshardable(module, skipped))


def _plan_alone(
    module: nn.Module, min_params: int, read: set[nn.Module], skipped: set[nn.Module]
) -> list[list[nn.Module]]:
    if sum(parameter.numel() for parameter in module.parameters()) < 2 * min_params:
        return []
    groups = find_sharding_blocks(module, min_params, read, skipped)
    found = {part for group in groups for part in group}
    separate_shared_owners(module, groups, read, skipped)
    sizes = count_own_params(module, groups, skipped)
    enough = min_params / 2  # for the rest of a group without the parameters it shares
    return [group for group, size in zip(groups, sizes, strict=True) if size >= enough or not found.issuperset(group)]


def _choose(
    wrap: Sequence[str | type[nn.Module]] | Callable[[str, nn.Module], bool],
    names: dict[nn.Module, str],
    read: set[nn.Module],
) -> list[nn.Module]:
    """Return the modules that the user wants, in the model's order."""
    inner = {part: name for part, name in names.items() if name}
    if callable(wrap):
        chosen = [part for part, name in inner.items() if part not in read and wrap(name, part)]
        if not chosen:
            raise ValueError(f"wrap={wrap!r} matches no module. {_list_classes(inner)}")
        return chosen
    wanted: dict[nn.Module, None] = {}
    for kind in wrap:
        matched = [p for p in inner if (type(p).__name__ == kind if isinstance(kind, str) else isinstance(p, kind))]
        if not matched:
            raise ValueError(f"wrap={kind!r} matches no module. {_list_classes(inner)}")
        unfit = [inner[part] for part in matched if part in read]
        if unfit:
            raise ValueError(
                f"wrap={kind!r} matches {unfit[0]!r}, whose parameters are used without calling it: "
                "name the class of its parent or of its children."
            )
        wanted.update(dict.fromkeys(matched))
    return [part for part in inner if part in wanted]


def _list_classes(parts: Iterable[nn.Module]) -> str:
    return f"The model has the classes {', '.join(sorted({type(part).__name__ for part in parts}))}."


def _name_unshardable(module: nn.Module, skipped: set[nn.Module]) -> tuple[str, ...]:
    ours = {p for part in module.modules() if part not in skipped for p in part.parameters(recurse=False)}
    named = module.named_parameters(remove_duplicate=False)
    return tuple(name for name, parameter in named if parameter in ours and not (parameter.dim() and parameter.numel()))


def _check(module: nn.Module, wrap: object, min_params: int) -> None:
    is_classes = isinstance(wrap, Sequence) and all(isinstance(kind, str | type) for kind in wrap)
    if isinstance(wrap, type) or not (is_classes or callable(wrap)):
        raise TypeError(f"wrap must be 'auto', a list of classes or their names, or a function, got {wrap!r}.")
    if isinstance(wrap, str) and wrap != "auto":
        raise ValueError(
            f"wrap must be 'auto', a list of classes or their names, or a function, got {wrap!r}: write a list."
        )
    if not isinstance(wrap, str) and is_classes and not wrap:
        raise ValueError("wrap must name at least one class, got an empty list.")
    if min_params < 1:
        raise ValueError(f"min_params must be at least 1, got {min_params}.")
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"Parameter {name!r} has no shape yet: run the model on a batch before it is sharded.")
        if any(size > 1 and not stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
            raise ValueError(
                f"Parameter {name!r} is an expanded tensor (strides {parameter.stride()}), whose elements share "
                "memory: use a copy, nn.Parameter(values.clone())."
            )


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
_COARSE_BLOCK = 4  # look into a block with more than 1/4 of all parameters
_COARSE_PART = 2  # and into any other part with more than 1/2

Group = list[nn.Module]


def find_sharding_blocks(
    root: nn.Module, min_params: int, read: set[nn.Module], skipped: set[nn.Module]
) -> list[Group]:
    """Cut ``root`` into groups of modules that are gathered together, in its order and not nested.

    What the model declares comes first (``_no_split_modules`` of transformers), then the children of a container that
    has several of one class. Small neighbours in an ``nn.Sequential`` or ``nn.ModuleList`` are merged; of the rest,
    every outermost large part is a group: embeddings, heads. ``read`` modules are no group on their own, ``skipped``
    ones in none.
    """
    finder = _BlockFinder(root, min_params, read, skipped)
    finder.split(root)
    return finder.groups


class _BlockFinder:
    def __init__(self, root: nn.Module, min_params: int, read: set[nn.Module], skipped: set[nn.Module]) -> None:
        self.groups: list[Group] = []
        self._min_params, self._read = min_params, read
        self._entered = find_entered_modules(root)
        self._done = set(skipped)
        self._sizes: dict[nn.Module, int] = {}
        names: set[str] = set()
        for module in root.modules():
            declared = getattr(module, "_no_split_modules", None)
            names.update(declared if isinstance(declared, Iterable) else ())
        self._declared = {part for part in root.modules() if part is not root and type(part).__name__ in names}
        self._blocks = self._declared.union(*map(_find_repeated, root.modules())) - self._read
        self._total = self._size(root)

    def split(self, module: nn.Module) -> None:
        """Find the groups inside ``module``, which is not one itself."""
        run: Group = []
        last: Group | None = None  # a group that just ended
        for child in module.children():
            if child in self._done or not self._size(child):
                continue
            self._done.add(child)
            if not self._goes_with_siblings(child, module):
                run, last = [], None
                self._place(child)
                continue
            run.append(child)
            if sum(map(self._size, run)) >= self._min_params:
                self.groups.append(run)
                run, last = [], run
        if last is not None:
            last += run

    def _place(self, module: nn.Module) -> None:
        """Make a group of ``module`` or of its parts, or leave it to the root."""
        if self._size(module) < self._min_params:
            return
        num_before = len(self.groups)
        if self._is_looked_into(module):
            self.split(module)
        if len(self.groups) == num_before and not {module} & (self._read | self._entered):
            self.groups.append([module])

    def _goes_with_siblings(self, child: nn.Module, parent: nn.Module) -> bool:
        """Whether all siblings of ``child`` run right before and after it."""
        in_list = isinstance(parent, nn.ModuleList) and child in self._blocks
        in_sequence = isinstance(parent, nn.Sequential) and type(parent).forward is nn.Sequential.forward
        return (in_list or in_sequence) and child not in self._read and not self._is_looked_into(child)

    def _is_looked_into(self, module: nn.Module) -> bool:
        if module in self._read or module in self._declared:
            return module in self._read
        if self._size(module) < 2 * self._min_params:
            return module in self._entered
        inner = {part for part in module.modules() if part is not module}
        if inner & self._declared or module in self._entered:
            return True
        fraction = self._total / self._size(module)
        if module in self._blocks:  # a Sequential runs all of its children; a block's list of experts may not
            sequences = (part for part in module.modules() if isinstance(part, nn.Sequential))
            has_stages = any(_is_composite(child) for part in sequences for child in _find_repeated(part))
            return fraction < _COARSE_BLOCK and has_stages
        return fraction < _COARSE_PART or any(map(_is_composite, inner & self._blocks))

    def _size(self, module: nn.Module) -> int:
        if module not in self._sizes:
            self._sizes[module] = sum(parameter.numel() for parameter in module.parameters())
        return self._sizes[module]


def _find_repeated(container: nn.Module) -> Group:
    """Return children of a container that share a class with another one."""
    if not isinstance(container, _CONTAINERS):
        return []
    children = [child for child in container.children() if any(True for _ in child.parameters())]
    counts = Counter(map(type, children))
    return [child for child in children if counts[type(child)] > 1]


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())


_OUTSIDE = -1  # of all groups


def separate_shared_owners(
    root: nn.Module, groups: list[Group], fixed: set[nn.Module], skipped: set[nn.Module]
) -> None:
    """Change ``groups`` in place so that every parameter is in one: FSDP2 refuses one of two groups.

    Modules that share a parameter become a group of their own. If one of them is in ``fixed``, which is only gathered
    as part of another module, their groups are merged, or given up to the next outer one. ``groups`` may be nested; the
    inner one then has its parameters.
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
    """Count the elements of each group outside inner groups; arguments as of :func:`separate_shared_owners`."""
    parameters: dict[int, set[nn.Parameter]] = defaultdict(set)
    for module, indices in _find_homes(root, groups, skipped).items():
        for index in indices:
            parameters[index].update(module.parameters(recurse=False))
    return [sum(parameter.numel() for parameter in parameters[index]) for index in range(len(groups))]


def _find_homes(root: nn.Module, groups: list[Group], skipped: set[nn.Module]) -> dict[nn.Module, set[int]]:
    """Return the groups of each module: one, if it is not shared."""
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
    """Return modules in different groups that share parameters, or one whole shared module if there is one."""
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
    """Add the modules that share other parameters with these."""
    found = dict.fromkeys(sharing)
    waiting = list(sharing)
    while waiting:
        for parameter in waiting.pop().parameters(recurse=False):
            new = [owner for owner in owners[parameter] if owner not in found]
            found.update(dict.fromkeys(new))
            waiting += new
    return list(found)


def _gather(groups: list[Group], owners: Group) -> None:
    """Make one group of the owners and all that they are grouped with."""
    touched = [group for group in groups if not set(group).isdisjoint(owners)]
    groups[:] = [group for group in groups if group not in touched]
    groups.append(_outermost([*(module for group in touched for module in group), *owners]))


def _outermost(modules: Group) -> Group:
    distinct = list(dict.fromkeys(modules))
    inner = {part for one in distinct for part in one.modules() if part is not one}
    return [one for one in distinct if one not in inner]


def order_inner_first(groups: list[Group]) -> Iterator[Group]:
    """Yield ``groups``, nested ones before outer ones; groups that contain each other are merged."""
    parts = {id(group): {part for module in group for part in module.modules()} - set(group) for group in groups}
    waiting = list(groups)
    while waiting:
        free = [g for g in waiting if not any(parts[id(g)] & set(other) for other in waiting if other is not g)]
        if not free:
            yield _outermost([module for group in waiting for module in group])
            return
        yield from free
        waiting = [group for group in waiting if not any(group is one for one in free)]
