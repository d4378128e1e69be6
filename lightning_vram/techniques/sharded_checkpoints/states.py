"""State dicts of a sharded module and its optimizers: full, as if nothing were sharded, and sharded.

To save a full one, rank 0 collects it in host memory; the other ranks hold one whole parameter at a time. To load, each
rank reads its own part, of a memory-mapped file or of a folder (``folder.py``): nothing is sent or copied to the
device. A model that exceeds the host memory of one machine needs sharded checkpoints.

``torch.distributed.checkpoint.state_dict`` does not serve here: it refuses a module with parameters on the host and
buffers on the device, takes a step to create optimizer state, and drops the versions of modules.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_vram.core.ranks import current_rank
from lightning_vram.core.tensors.codecs import LowBitTensor, decoded
from lightning_vram.core.tensors.properties import WHOLE_LAYOUT, state_stored_like
from lightning_vram.private_names.dispatcher import COMPILED_PART
from lightning_vram.private_names.fsdp2 import cut_own_shard, local_shard, wrap_like
from lightning_vram.private_names.torch import CHECKPOINT_WRAPPED, IncompatibleKeys, metadata_of, set_metadata

_WRAPPERS = (COMPILED_PART, CHECKPOINT_WRAPPED)
_MOST_NAMES = 10  # in a message
_WAY_OUT = "Return the optimizer the checkpoint was saved with: the same parameters, in the same order."
Pairs = list[tuple[Tensor, Tensor]]  # of a whole tensor in a checkpoint, and one to read it, or the own part, into


def clean_name(name: str) -> str:
    """Remove the names of wrappers (``torch.compile``, activation checkpointing) from a dotted name."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def parameters_by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by clean name, tied ones under each of theirs."""
    return {clean_name(name): parameter for name, parameter in module.named_parameters(remove_duplicate=False)}


def first_names(module: nn.Module) -> dict[int, str]:
    """Return the first clean name of each parameter, by its ``id``."""
    return {id(parameter): name for name, parameter in reversed(list(parameters_by_name(module).items()))}


def names_in_optimizer(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Name an optimizer's parameters by group, by first clean name; ``ValueError`` if one is not the module's."""
    names = first_names(module)
    groups: list[list[Any]] = [[names.get(id(one)) for one in group["params"]] for group in optimizer.param_groups]
    for index, group in enumerate(groups):
        if None in group:
            raise ValueError(
                f"A parameter in group {index} of {type(optimizer).__name__} has no name: save full checkpoints."
            )
    return groups


def check_fit(own: Mapping[str, Any], given: Mapping[str, Any], *, strict: bool) -> None:
    """Raise ``ValueError`` if the given values do not fit those of a module, before anything is loaded."""
    complaints = []
    if strict:
        complaints += [f"lacks {name}" for name in sorted(own.keys() - given.keys())]
        complaints += [f"has, unlike the module, {name}" for name in sorted(given.keys() - own.keys())]
    for name in filter(own.__contains__, given):
        found, shape = (list(getattr(one[name], "shape", ())) for one in (given, own))
        if found != shape:
            complaints.append(f"has {found} for {name} of shape {shape}")
    if complaints:
        more = f" and {len(complaints) - _MOST_NAMES} more" if len(complaints) > _MOST_NAMES else ""
        raise ValueError(
            f"The checkpoint does not fit the module: it {'; it '.join(complaints[:_MOST_NAMES])}{more}. Load it into "
            "the module it was saved from; with self.strict_loading = False names may be missing or additional."
        )


def map_leaves(tree: Any, convert: Callable[[Any], Any]) -> Any:
    """Build the same tree with converted leaves; containers are new, classes and attributes of dicts stay."""
    if isinstance(tree, dict):
        mapped = copy.copy(tree)
        for key, value in tree.items():
            mapped[key] = map_leaves(value, convert)
        return mapped
    if type(tree) in (list, tuple):
        return type(tree)(map_leaves(value, convert) for value in tree)
    return convert(tree)


def snapshot(tree: Any) -> Any:
    """Copy a tree to the host. Sharded tensors stay sharded."""
    return map_leaves(
        tree, lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else copy.deepcopy(leaf)
    )


def sharded_module_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's own tensors, not gathered, under clean names."""
    state = module.state_dict()
    result = OrderedDict((clean_name(key), value) for key, value in state.items())
    # Versions of modules, which baseline checkpoints have:
    set_metadata(result, OrderedDict((clean_name(name), each) for name, each in (metadata_of(state) or {}).items()))
    return result


def gather_module_state(module: nn.Module) -> dict[str, Any]:
    """Return the whole ``state_dict()`` on the host of rank 0, with clean names; empty elsewhere. A collective."""
    state, names = sharded_module_state(module), first_names(module)
    # tied by identity, so that all ranks agree: empty parts all have address 0
    for name, parameter in parameters_by_name(module).items():
        if name in state:
            state[name] = state.get(names[id(parameter)], state[name])
    return _gather(state)


def sharded_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Return an optimizer's own state, not gathered, with clean names instead of numbers; creates no state."""
    return renamed(optimizer.state_dict(), names_in_optimizer(module, optimizer))


def gather_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the whole ``state_dict()`` on the host of rank 0; empty elsewhere. A collective."""
    result = _gather(optimizer.state_dict())
    own = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for key, parameter in zip(chain.from_iterable(_keys(result)), own, strict=False):
        if key in result["state"] and hasattr(parameter, WHOLE_LAYOUT):
            result["state"][key] = state_stored_like(result["state"][key], getattr(parameter, WHOLE_LAYOUT))
    return result


def _gather(state: dict[str, Any]) -> dict[str, Any]:
    is_main = current_rank() == 0
    gathered: dict[int, Any] = {}

    def gather(leaf: Any) -> Any:
        if id(leaf) not in gathered:
            gathered[id(leaf)] = _whole(leaf, keep=is_main)
        return gathered[id(leaf)]

    result: dict[str, Any] = map_leaves(state, gather)
    return result if is_main else {}


def _whole(value: Any, *, keep: bool) -> Any:
    if isinstance(value, DTensor):
        if isinstance(part := local_shard(value), LowBitTensor):
            value = wrap_like(part.decode(), value)
        full: Tensor = value.full_tensor().detach()
        own = value.to_local().untyped_storage().data_ptr()
        # On one rank it may be the part itself.
        return full.to("cpu", copy=full.untyped_storage().data_ptr() == own) if keep else None
    if isinstance(value, Tensor):
        return decoded(value).detach().to("cpu", copy=True) if keep else None
    return value


def _keys(state_dict: Mapping[str, Any]) -> list[list[Any]]:
    """Return what an optimizer's state calls its parameters, by group."""
    return [group["params"] for group in state_dict.get("param_groups", ())]


def renamed(state_dict: Mapping[str, Any], names: Sequence[Sequence[Any]] | None = None) -> dict[str, Any]:
    """Return an optimizer's state with other names for its parameters, by group; ``None``: numbered in their order."""
    saved = _keys(state_dict)
    if names is None:
        numbers = iter(range(sum(map(len, saved))))
        names = [[next(numbers) for _ in group] for group in saved]
    new = dict(zip(chain.from_iterable(saved), chain.from_iterable(names), strict=True))
    groups = [{**group, "params": list(own)} for group, own in zip(state_dict["param_groups"], names, strict=True)]
    state = {new.get(key, key): values for key, values in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": groups}


def match_parameters(module: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved state with parameters numbered in the optimizer's order, by name if the state has names."""
    saved = _keys(state_dict)
    has_names = any(isinstance(key, str) for group in saved for key in group)
    own = names_in_optimizer(module, optimizer) if has_names else saved
    saved_sizes = [len(group) for group in saved]
    own_sizes = [len(group["params"]) for group in optimizer.param_groups]
    if saved_sizes != own_sizes or [set(group) for group in saved] != [set(group) for group in own]:
        others = ", with other names" if saved_sizes == own_sizes else ""
        raise ValueError(
            f"The checkpoint's optimizer has {saved_sizes} parameters in its groups, {type(optimizer).__name__} of "
            f"configure_optimizers has {own_sizes}{others}. {_WAY_OUT}"
        )
    groups = [{**group, "params": keys} for group, keys in zip(state_dict["param_groups"], own, strict=True)]
    for group in groups if has_names else ():
        group.pop("param_names", None)  # in the order of saving; load_state_dict takes the optimizer's
    return renamed({**state_dict, "param_groups": groups})


def check_shapes(module: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any], index: int) -> None:
    """Refuse states of :func:`match_parameters` with other names or shapes: fused kernels would read past their end."""
    names = first_names(module)
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        for mine, other in zip(group.get("param_names") or (), saved.get("param_names") or (), strict=False):
            if clean_name(mine) != clean_name(other):
                raise ValueError(f"The checkpoint has {other} where optimizer {index} has {mine}. {_WAY_OUT}")
    own = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for key, parameter in zip(chain.from_iterable(_keys(state_dict)), own, strict=True):
        for name, value in state_dict["state"].get(key, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                raise ValueError(
                    f"The checkpoint's {name} of {names.get(id(parameter), 'a parameter')} in optimizer {index} has "
                    f"shape {list(value.shape)}, the parameter {list(parameter.shape)}. {_WAY_OUT}"
                )


def read_whole(pairs: Pairs) -> None:
    """Copy whole tensors, or of those for sharded ones the own part: nothing is sent."""
    with torch.no_grad():
        for value, into in pairs:
            if isinstance(into, DTensor):
                into.to_local().copy_(cut_own_shard(value, into))
            else:
                into.copy_(value)


# On the host, for a whole tensor: a mapped file would be copied page by page, and stay open.
empty_like: Callable[[Tensor], Tensor] = partial(torch.empty_like, device="cpu")


def prepare(tree: Any, pairs: Pairs, make: Callable[[Tensor], Tensor] = empty_like) -> Any:
    """Return a tree with tensors that ``make`` returns for its own; ``pairs`` gets both."""

    def convert(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        pairs.append((leaf, make(leaf)))
        return pairs[-1][1]

    return map_leaves(tree, convert)


def load_module_state(
    module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool, read: Callable[[Pairs], None] = read_whole
) -> IncompatibleKeys:
    """Load whole tensors into a sharded module, in place, as ``load_state_dict`` does.

    ``state_dict`` is the same on every rank. On ``ValueError``, if it does not fit, nothing has changed on any rank.
    """
    state = module.state_dict()
    own = {clean_name(key): value for key, value in state.items()}
    keys = dict(zip(own, state, strict=True))
    # empty extra states are not in a folder
    given: dict[str, Any] = {name: value for name, value in own.items() if isinstance(value, dict) and not value}
    given |= {clean_name(key): value for key, value in state_dict.items()}
    check_fit(own, given, strict=strict)
    pairs: Pairs = []
    loaded: OrderedDict[str, Any] = OrderedDict()
    for name, value in given.items():
        if isinstance(into := own.get(name), Tensor):
            pairs.append((value, into))
            loaded[keys[name]] = into
        else:
            loaded[keys.get(name, name)] = prepare(value, pairs) if name in own else value
    read(pairs)
    set_metadata(loaded, metadata_of(state_dict) or {})
    return module.load_state_dict(loaded, strict=strict)  # type: ignore[no-any-return]


def load_optimizer_state(
    optimizer: Optimizer, state_dict: Mapping[str, Any], *, read: Callable[[Pairs], None] = read_whole
) -> None:
    """Load a state of :func:`match_parameters`, the same on every rank; it becomes sharded as parameters are."""
    pairs: Pairs = []
    state = dict(state_dict["state"])
    own = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for key, parameter in zip(chain.from_iterable(_keys(state_dict)), own, strict=True):
        current = optimizer.state.get(parameter, {})
        if key in state:
            state[key] = {
                name: prepare(value, pairs, partial(_empty_state, parameter, current.get(name)))
                for name, value in state[key].items()
            }
    read(pairs)
    optimizer.load_state_dict({**state_dict, "state": state})


def _empty_state(parameter: Tensor, current: Any, value: Tensor) -> Tensor:
    """Return a tensor that is sharded as its parameter; not for ``step``, nor if it is whole now."""
    is_plain_now = isinstance(current, Tensor) and not isinstance(current, DTensor)
    if isinstance(parameter, DTensor) and value.shape == parameter.shape and not is_plain_now:
        return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
    return empty_like(value)
