"""Plan which modules of a model FSDP2 shards together.

FSDP2 gathers the parameters of one group at a time. A group for every block of a model, and one for each large
embedding or head, keeps little on the device; a group for every small layer costs more messages than it saves memory.
What is in no group is gathered with the whole model and stays for the whole step.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_vram.techniques.sharding.grouping.blocks import find_sharding_blocks
from lightning_vram.techniques.sharding.grouping.outside_access import find_read_modules, is_sharded_itself
from lightning_vram.techniques.sharding.grouping.shared_owners import (
    count_own_params,
    order_inner_first,
    separate_shared_owners,
)

Wrap = Literal["auto"] | Sequence[str | type[nn.Module]] | Callable[[str, nn.Module], bool]
_MIN_PARAMS = 1_000_000


@dataclass(frozen=True)
class ShardingPlan:
    """What to call ``fully_shard`` with.

    Args:
        groups: Names of modules, as in ``named_modules()``; each inner tuple is for one call of ``fully_shard``. Groups
            nested in others come before them. The root is in none: it is sharded after all of these.
        replicated: Names of the parameters without a dimension, or without elements, which FSDP2 cannot shard; all
            names of each.
    """

    groups: tuple[tuple[str, ...], ...]
    replicated: tuple[str, ...]


def plan_sharding_groups(module: nn.Module, wrap: Wrap = "auto", *, min_params: int = _MIN_PARAMS) -> ShardingPlan:
    """Plan the FSDP2 groups of ``module``, which is left as it is.

    Parts that are sharded already are left alone. Modules that have a parameter in common are in one group. A module is
    never a group on its own if its parameters are used without calling it: containers, the parts of an
    ``nn.MultiheadAttention`` or of a parametrization, an embedding whose weight a forward reads.

    Args:
        module: The whole model; its parameters may be on ``meta``.
        wrap: ``"auto"``: the blocks a model repeats or declares, small ones put together, and other parts that are
            large. Classes or names of classes: all modules of these, whatever their size. Or a function of a module's
            name and the module that returns whether it is wanted; modules that cannot be a group it is not asked for.
        min_params: Number of elements that ``"auto"`` wants in a group. With less than twice as many in the whole
            model it makes none.

    Returns:
        The plan, the same on all ranks if the model is.

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
    skipped = {inner for part in names if is_sharded_itself(part) for inner in part.modules()}
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
    enough = min_params / 2  # for what is left of a group beside the parameters it shares
    return [group for group, size in zip(groups, sizes, strict=True) if size >= enough or not found.issuperset(group)]


def _choose(
    wrap: Sequence[str | type[nn.Module]] | Callable[[str, nn.Module], bool],
    names: dict[nn.Module, str],
    read: set[nn.Module],
) -> list[nn.Module]:
    """Return what the user wants, in the model's order."""
    inner = {part: name for part, name in names.items() if name}
    if callable(wrap):
        chosen = [part for part, name in inner.items() if part not in read and wrap(name, part)]
        if not chosen:
            raise ValueError(f"wrap={wrap!r} matches no module. {_list_classes(inner)}")
        return chosen
    wanted: dict[nn.Module, None] = {}
    for kind in wrap:
        matched = [part for part in inner if _is_of(part, kind)]
        if not matched:
            raise ValueError(f"wrap={kind!r} matches no module. {_list_classes(inner)}")
        unfit = [inner[part] for part in matched if part in read]
        if unfit:
            raise ValueError(
                f"wrap={kind!r} matches {unfit[0]!r}, whose parameters are used without calling it: "
                "name the class of a module around it, or of those in it."
            )
        wanted.update(dict.fromkeys(matched))
    return [part for part in inner if part in wanted]


def _is_of(part: nn.Module, kind: str | type[nn.Module]) -> bool:
    return type(part).__name__ == kind if isinstance(kind, str) else isinstance(part, kind)


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
        raise ValueError("wrap must name a class at least, got an empty list.")
    if min_params < 1:
        raise ValueError(f"min_params must be at least 1, got {min_params}.")
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(f"Parameter {name!r} has no shape yet: run the model on a batch before it is sharded.")
        if any(size > 1 and not stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True)):
            raise ValueError(
                f"Parameter {name!r} is an expanded tensor (strides {parameter.stride()}), whose numbers share memory: "
                "make it of a copy, nn.Parameter(values.clone())."
            )
