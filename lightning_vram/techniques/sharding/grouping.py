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
from functools import lru_cache
from graphlib import TopologicalSorter
from types import CodeType
from typing import Literal

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.core.tensors.properties import sharded_modules
from lightning_vram.private_names.torch import own_children, own_parameters

_ENTRIES = ("forward", "training_step", "validation_step", "test_step", "predict_step")
_ATTRIBUTE_LOADS = ("LOAD_ATTR", "LOAD_METHOD")
_HARMLESS = ("dtype", "is_meta", "ndim", "requires_grad", "shape")  # the same of a shard

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)

Chain = tuple[str, ...]


def find_read_modules(root: nn.Module) -> set[nn.Module]:
    """Find modules that are not called, or not before their parameters are used.

    These are modules without a forward, parts of an ``nn.MultiheadAttention`` and of parametrizations, and modules
    whose parameters an outer forward or step names (``hidden @ self.embedding.weight.T``), where they would still be
    shards. The code is inspected, not run; reads by an index (``self.layers[0].weight``) or by ``getattr`` are missed.
    """
    read: set[nn.Module] = set()
    for module in root.modules():
        if type(module).forward is nn.Module.forward and "forward" not in vars(module):  # ModuleList and such
            read.add(module)
        if isinstance(module, nn.MultiheadAttention):
            read.update(part for part in module.modules() if part is not module)
        elif is_parametrized(module):
            read.update(module.parametrizations.modules())  # type: ignore[union-attr]
    for path, rest in _follow_all(root):
        owner, name = path[-1], rest[0]
        is_parameter = name in own_parameters(owner) or is_parametrized(owner, name)
        if is_parameter and not (len(rest) > 1 and rest[1] in _HARMLESS):
            read.update(path)
    return read


def find_entered_modules(root: nn.Module) -> set[nn.Module]:
    """Find modules of which an outer forward or step calls another method than ``forward``."""
    return {
        path[-1]
        for path, (name, *_) in _follow_all(root)
        if not hasattr(nn.Module, name) and inspect.isfunction(getattr(type(path[-1]), name, None))
    }


def find_named_weights(root: nn.Module) -> set[nn.Parameter]:
    """Find the parameters that code of the model's classes names, so that it may see their dtype or round values.

    That is by ``self.layer.weight``, or by ``layer.weight``, for layers in lists. The code of forwards and steps is
    inspected, not run; that of hooks is not.
    """
    found: set[nn.Parameter] = set()
    for module, chain in _iterate_chains(root):
        if type(module).__module__.startswith("torch.nn."):
            continue  # it names weights to choose a fast path
        if chain[0] in ("weight", "bias"):
            lists = (child for child in own_children(module).values() if isinstance(child, _CONTAINERS))
            found.update(parameter for child in lists for parameter in child.parameters())
        for (*_, owner), rest in _follow(module, chain):
            is_read = rest[1:2] == ("dtype",) or not (len(rest) > 1 and rest[1] in (*_HARMLESS, "device"))
            found.update(p for p in [own_parameters(owner).get(rest[0])] if p is not None and is_read)
    return found


def _iterate_chains(root: nn.Module) -> Iterator[tuple[nn.Module, Chain]]:
    """Yield the modules, each with all chains of attributes in the code of its class (``self.a.b``)."""
    chains = {kind: _read_chains(kind) for kind in set(map(type, root.modules()))}
    for module in root.modules():
        yield from ((module, chain) for chain in chains[type(module)])


def _follow(module: nn.Module, chain: Chain) -> Iterator[tuple[list[nn.Module], Chain]]:
    """Yield the modules along ``chain`` from each of its attributes on, and the rest, if neither is empty."""
    for start in range(len(chain)):
        path, rest = [module], chain[start:]
        while rest and (child := own_children(path[-1]).get(rest[0])) is not None:
            path.append(child)
            rest = rest[1:]
        if rest and len(path) > 1:
            yield path[1:], rest


def _follow_all(root: nn.Module) -> Iterator[tuple[list[nn.Module], Chain]]:
    for module, chain in _iterate_chains(root):
        yield from _follow(module, chain)


def _read_chains(kind: type) -> set[Chain]:
    """Return the chains of attributes in the entries of a class of modules, and in the methods that they name."""
    chains: set[Chain] = set()
    names = list(_ENTRIES)
    for name in names:  # the list grows
        function = inspect.unwrap(inspect.getattr_static(kind, name, None))
        if inspect.isfunction(function):
            found = _chains_of(function.__code__)
            chains |= found
            names += {part for chain in found for part in chain if not hasattr(nn.Module, part)}.difference(names)
    return chains


@lru_cache(maxsize=1024)
def _chains_of(code: CodeType) -> frozenset[Chain]:
    found: set[Chain] = set()
    chain: list[str] = []
    for instruction in dis.get_instructions(code):
        if instruction.opname in _ATTRIBUTE_LOADS:
            chain.append(instruction.argval)
            continue
        if chain:
            found.add(tuple(chain))
        chain = []
    return frozenset(found).union(*(_chains_of(inner) for inner in code.co_consts if isinstance(inner, CodeType)))


Group = list[nn.Module]
Wrap = Literal["auto"] | Sequence[str | type[nn.Module]] | Callable[[str, nn.Module], bool]
_MIN_PARAMS = 1_000_000


@dataclass(frozen=True)
class ShardingPlan:
    """What to call ``fully_shard`` with."""

    groups: tuple[tuple[str, ...], ...]  # modules by name, for each call, nested ones first; the root is in none
    replicated: tuple[str, ...]  # all names of parameters without a dimension or elements, which FSDP2 cannot shard


def plan_sharding_groups(module: nn.Module, wrap: Wrap = "auto", *, min_params: int = _MIN_PARAMS) -> ShardingPlan:
    """Plan the FSDP2 groups of ``module``, the same on all ranks if the model is.

    Parts that are already sharded are skipped. Modules that share a parameter are in one group. A module of
    :func:`find_read_modules` is never a group on its own.

    Args:
        module: The whole model; its parameters may be on ``meta``.
        wrap: ``"auto"``: the blocks that a model repeats or declares, small ones merged, and other large parts. Or
            classes or class names: all such modules. Or a function of name and module.
        min_params: Smallest number of elements in a group of ``"auto"``, which makes none in models of less than twice
            it.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        >>> plan_sharding_groups(model, min_params=50)
        ShardingPlan(groups=(('0',), ('2',)), replicated=())
    """
    is_function = callable(wrap) and not isinstance(wrap, type)
    kinds = wrap if isinstance(wrap, Sequence) and not isinstance(wrap, str) else ()
    if not (wrap == "auto" or is_function or (kinds and all(isinstance(kind, str | type) for kind in kinds))):
        raise TypeError(f"wrap must be 'auto', a list of classes or their names, or a function, got {wrap!r}.")
    check_positive_int("min_params", min_params)
    names = {part: name for name, part in module.named_modules()}
    skipped = {inner for part in sharded_modules(module) for inner in part.modules()}
    read = find_read_modules(module)
    if isinstance(wrap, str):
        groups = _plan_alone(module, min_params, read, skipped)
    else:
        chosen = _choose(wrap, names, read)
        groups = separate_shared_owners(module, [[part] for part in chosen if part not in skipped], read, skipped)
    order = {part: position for position, part in enumerate(names)}
    groups = [sorted(group, key=order.__getitem__) for group in groups]
    groups.sort(key=lambda group: order[group[0]])
    parts = [{part for one in group for part in one.modules()} - set(group) for group in groups]
    inner = {i: [j for j, other in enumerate(groups) if not part.isdisjoint(other)] for i, part in enumerate(parts)}
    inner_first = (groups[index] for index in TopologicalSorter(inner).static_order())
    parameters = module.named_parameters(remove_duplicate=False)
    return ShardingPlan(
        groups=tuple(tuple(names[part] for part in group) for group in inner_first),
        replicated=tuple(name for name, parameter in parameters if not (parameter.dim() and parameter.numel())),
    )


def _plan_alone(module: nn.Module, min_params: int, read: set[nn.Module], skipped: set[nn.Module]) -> list[Group]:
    if sum(parameter.numel() for parameter in module.parameters()) < 2 * min_params:
        return []
    finder = _BlockFinder(module, min_params, read, skipped)
    finder.split(module)
    found = {part for group in finder.groups for part in group}
    groups = separate_shared_owners(module, finder.groups, read, skipped)
    sizes: Counter[int] = Counter()
    for part, homes in _find_homes(module, groups, skipped).items():
        sizes[min(homes)] += sum(parameter.numel() for parameter in part.parameters(recurse=False))
    enough = min_params / 2  # for the rest of a group without the parameters it shares
    return [group for index, group in enumerate(groups) if sizes[index] >= enough or not found.issuperset(group)]


def _choose(
    wrap: Sequence[str | type[nn.Module]] | Callable[[str, nn.Module], bool],
    names: dict[nn.Module, str],
    read: set[nn.Module],
) -> list[nn.Module]:
    """Return the modules that the user wants."""
    parts = {part: name for part, name in names.items() if name and not (callable(wrap) and part in read)}
    chosen: list[nn.Module] = []
    for kind in [wrap] if callable(wrap) else wrap:
        matched = [part for part, name in parts.items() if _is_chosen(kind, name, part)]
        unfit = [parts[part] for part in matched if part in read]
        if unfit:
            raise ValueError(
                f"wrap={kind!r} matches {unfit[0]!r}, whose parameters are used without calling it: "
                "name the class of its parent or of its children."
            )
        if not matched:
            classes = ", ".join(sorted({type(part).__name__ for part in parts}))
            raise ValueError(f"wrap={kind!r} matches no module. The model has the classes {classes}.")
        chosen += matched
    return list(dict.fromkeys(chosen))


def _is_chosen(kind: str | type[nn.Module] | Callable[[str, nn.Module], bool], name: str, part: nn.Module) -> bool:
    if isinstance(kind, str):
        return type(part).__name__ == kind
    return isinstance(part, kind) if isinstance(kind, type) else kind(name, part)


class _BlockFinder:
    """Cuts ``root`` into groups of modules that are gathered together, in its order and not nested.

    What the model declares comes first (``_no_split_modules`` of transformers), then the children of a container that
    has several of one class. Small neighbours in an ``nn.Sequential`` or ``nn.ModuleList`` are merged; of the rest,
    every outermost large part is a group: embeddings, heads. ``read`` modules are no group on their own, ``skipped``
    ones in none.
    """

    def __init__(self, root: nn.Module, min_params: int, read: set[nn.Module], skipped: set[nn.Module]) -> None:
        self.groups: list[Group] = []
        self._root, self._min_params, self._read = root, min_params, read
        self._entered = find_entered_modules(root)
        self._done = set(skipped)
        parts = list(root.modules())
        self._sizes = {part: sum(parameter.numel() for parameter in part.parameters()) for part in parts}
        declared = [getattr(part, "_no_split_modules", None) for part in parts]
        kinds = {kind for names in declared if isinstance(names, Iterable) for kind in names}
        self._declared = {part for part in parts if part is not root and type(part).__name__ in kinds}
        self._blocks = self._declared.union(*map(_find_repeated, parts)) - read

    def split(self, module: nn.Module) -> None:
        """Find the groups inside ``module``, which is not one itself."""
        run: Group = []
        last: Group | None = None  # a group that just ended
        for child in module.children():
            if child in self._done or not self._sizes[child]:
                continue
            self._done.add(child)
            in_list = isinstance(module, nn.ModuleList) and child in self._blocks
            in_sequence = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
            # Siblings that do not run right before and after it:
            if not (in_list or in_sequence) or child in self._read or self._is_looked_into(child):
                run, last = [], None
                self._place(child)
                continue
            run.append(child)
            if sum(self._sizes[part] for part in run) >= self._min_params:
                self.groups.append(run)
                run, last = [], run
        if last is not None:
            last += run

    def _place(self, module: nn.Module) -> None:
        """Make a group of ``module`` or of its parts, or leave it to the root."""
        if self._sizes[module] < self._min_params:
            return
        num_before = len(self.groups)
        if self._is_looked_into(module):
            self.split(module)
        if len(self.groups) == num_before and not {module} & (self._read | self._entered):
            self.groups.append([module])

    def _is_looked_into(self, module: nn.Module) -> bool:
        if module in self._read or module in self._declared:
            return module in self._read
        if self._sizes[module] < 2 * self._min_params or module in self._entered:
            return module in self._entered
        inner = {part for part in module.modules() if part is not module}
        if module not in self._blocks:
            return bool(inner & self._blocks) or 2 * self._sizes[module] > self._sizes[self._root]
        # A Sequential runs all of its children; a block's list of experts may not.
        sequences = (part for part in module.modules() if isinstance(part, nn.Sequential))
        inside = (one for part in sequences for child in _find_repeated(part) for one in child.children())
        return bool(inner & self._declared) or any(True for _ in inside)


def _find_repeated(container: nn.Module) -> Group:
    """Return children of a container that share a class with another one."""
    if not isinstance(container, _CONTAINERS):
        return []
    children = [child for child in container.children() if any(True for _ in child.parameters())]
    counts = Counter(map(type, children))
    return [child for child in children if counts[type(child)] > 1]


_OUTSIDE = -1  # of all groups


def separate_shared_owners(
    root: nn.Module, groups: list[Group], fixed: set[nn.Module], skipped: set[nn.Module]
) -> list[Group]:
    """Return ``groups`` changed so that every parameter is in one: FSDP2 refuses one of two groups.

    Modules that share a parameter become a group of their own. If one of them is in ``fixed``, which is only gathered
    as part of another module, their groups are given up to the next outer one. ``groups`` may be nested; the inner one
    then has its parameters.
    """
    given_up = {root, *fixed}
    while True:
        homes = _find_homes(root, groups, skipped)
        owners = _find_conflict(homes)
        if not owners:
            return groups
        is_free = given_up.isdisjoint(owners)
        indices = set().union(*(homes[owner] for owner in owners))
        touched = [g for i, g in enumerate(groups) if (not set(g).isdisjoint(owners) if is_free else i in indices)]
        groups = [group for group in groups if group not in touched]
        modules = [module for group in touched for module in group]
        if is_free:
            together = dict.fromkeys([*modules, *owners])
            inner = {part for one in together for part in one.modules() if part is not one}
            groups.append([one for one in together if one not in inner])
        else:
            given_up.update(modules)


def _find_homes(root: nn.Module, groups: list[Group], skipped: set[nn.Module]) -> dict[nn.Module, set[int]]:
    """Return the groups of each module: one, if it is not shared."""
    units = {module: index for index, group in enumerate(groups) for module in group}
    homes: dict[nn.Module, set[int]] = defaultdict(set)
    for start, index in {root: _OUTSIDE, **units}.items():
        waiting = [start]
        for module in waiting:  # the list grows
            if index not in homes[module]:
                homes[module].add(index)
                waiting += [child for child in module.children() if child not in units and child not in skipped]
    return homes


def _find_conflict(homes: dict[nn.Module, set[int]]) -> Group:
    """Return modules in different groups that share a parameter, or one whole shared module if there is one."""
    owners: dict[nn.Parameter, Group] = defaultdict(list)
    for module, indices in homes.items():
        if len(indices) > 1 and any(True for _ in module.parameters()):
            return [module]
        for parameter in set(module.parameters(recurse=False)):
            owners[parameter].append(module)
    conflicts = (sharing for sharing in owners.values() if len(set().union(*(homes[owner] for owner in sharing))) > 1)
    return next(conflicts, [])
