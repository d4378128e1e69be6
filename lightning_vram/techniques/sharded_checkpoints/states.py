"""Full state dicts of a sharded module and its optimizers, as if nothing were sharded.

To save, rank 0 collects them in host memory; the other ranks hold one whole parameter at a time. To load, each rank
cuts its own part out of a memory-mapped file: nothing is sent or copied to the device. A model that exceeds the host
memory of one machine needs sharded checkpoints (``folder.py``).
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def clean_name(name: str) -> str:
    """Remove the names of wrappers (``torch.compile``, activation checkpointing) from a dotted name."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def parameters_by_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return parameters by clean name, tied ones under each of theirs."""
    return {clean_name(name): parameter for name, parameter in module.named_parameters(remove_duplicate=False)}


def names_in_optimizer(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Name an optimizer's parameters by group, by first clean name; ``ValueError`` if one is not the module's."""
    names: dict[int, str] = {}
    for name, parameter in parameters_by_name(module).items():
        names.setdefault(id(parameter), name)
    groups = [[names.get(id(parameter)) for parameter in group["params"]] for group in optimizer.param_groups]
    for index, group in enumerate(groups):
        if None in group:
            raise ValueError(
                f"Parameter {group.index(None)} in group {index} of {type(optimizer).__name__} does not belong to "
                "the module; sharded checkpoints store optimizer state by name. Save full checkpoints."
            )
    return [[name for name in group if name is not None] for group in groups]


def check_fit(module_state: Mapping[str, Any], shapes: Mapping[str, Sequence[int] | None], *, strict: bool) -> None:
    """Raise ``ValueError`` if a checkpoint does not fit a module, before anything is loaded.

    Names are clean ones; the shape of what is not a tensor is ``None``.
    """
    complaints = []
    if strict:
        complaints += _list("lacks", module_state.keys() - shapes.keys())
        complaints += _list("has, unlike the module,", shapes.keys() - module_state.keys())
    for name, shape in shapes.items():
        own = module_state.get(name)
        if isinstance(own, Tensor) and (shape is None or tuple(shape) != tuple(own.shape)):
            found = "no tensor" if shape is None else list(shape)
            complaints.append(f"has {found} for {name} of shape {list(own.shape)}")
    if complaints:
        raise ValueError(
            f"The checkpoint does not fit the module: it {'; it '.join(complaints[:_MOST_NAMES])}. Load it into the "
            "module it was saved from; self.strict_loading = False in the LightningModule allows for missing and "
            "additional names."
        )


def _list(what: str, keys: Iterable[str]) -> list[str]:
    names = sorted(keys)
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return [f"{what} {', '.join(names[:_MOST_NAMES])}{more}"] if names else []


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
    return map_leaves(tree, _copy_leaf)


def count_bytes(tree: Any) -> int:
    """Count the bytes of all tensors of a tree, each once, sharded ones with the parts of all ranks."""
    sizes: dict[int, int] = {}
    waiting = [tree]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Tensor):
            sizes[id(part)] = part.numel() * part.element_size()
        elif isinstance(part, dict):
            waiting += part.values()
        elif type(part) in (list, tuple):
            waiting += part
    return sum(sizes.values())


def copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a regular tensor, detached."""
    return tensor.detach().to("cpu", copy=True)


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, DTensor):
        with torch.no_grad():
            return wrap_like(copy_to_host(leaf.to_local()), leaf)
    if isinstance(leaf, Tensor):
        return copy_to_host(leaf)
    return copy.deepcopy(leaf)


def gather_module_state(module: nn.Module) -> dict[str, Any]:
    """Return the whole ``state_dict()`` on the host of rank 0, with clean names; empty elsewhere. A collective."""
    is_main, state = current_rank() == 0, module.state_dict()
    # tied by identity, so that all ranks agree: empty parts all have address 0
    tied_to = {name: id(parameter) for name, parameter in parameters_by_name(module).items()}
    gathered: dict[int | str, Any] = {}
    result: OrderedDict[str, Any] = OrderedDict()
    for key, value in state.items():
        name = clean_name(key)
        owner = tied_to.get(name, name)
        if owner not in gathered:
            gathered[owner] = _whole(value, keep=is_main)
        result[name] = gathered[owner]
    metadata = metadata_of(state) or {}  # versions of modules, which baseline checkpoints have
    set_metadata(result, OrderedDict((clean_name(name), each) for name, each in metadata.items()))
    return result if is_main else {}


def gather_optimizer_state(optimizer: Optimizer) -> dict[str, Any]:
    """Return the whole ``state_dict()`` on the host of rank 0; empty elsewhere. A collective."""
    is_main = current_rank() == 0
    result: dict[str, Any] = map_leaves(optimizer.state_dict(), lambda leaf: _whole(leaf, keep=is_main))
    if not is_main:
        return {}
    for own, group in zip(optimizer.param_groups, result["param_groups"], strict=True):
        for parameter, key in zip(own["params"], group["params"], strict=True):
            if key in result["state"] and hasattr(parameter, WHOLE_LAYOUT):
                layout = getattr(parameter, WHOLE_LAYOUT)
                result["state"][key] = state_stored_like(result["state"][key], layout)
    return result


def load_module_state(module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool) -> IncompatibleKeys:
    """Load whole tensors into a sharded module, in place, as ``load_state_dict`` does.

    ``state_dict`` is the same on every rank. On ``ValueError``, if it does not fit, nothing has changed on any rank.
    """
    own = module.state_dict()
    own_keys, own_state = {clean_name(key): key for key in own}, {clean_name(key): own[key] for key in own}
    given = {clean_name(key): value for key, value in state_dict.items()}
    shapes = {name: tuple(value.shape) if isinstance(value, Tensor) else None for name, value in given.items()}
    check_fit(own_state, shapes, strict=strict)
    own_form: OrderedDict[str, Any] = OrderedDict(
        (own_keys.get(name, name), _placed_like(value, own_state.get(name))) for name, value in given.items()
    )
    metadata = metadata_of(state_dict)
    if metadata is not None:
        set_metadata(own_form, metadata)
    keys: IncompatibleKeys = module.load_state_dict(own_form, strict=strict)
    return keys


def check_groups(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` if the number of groups, or of parameters in one, differs."""
    saved_sizes = [len(group["params"]) for group in state_dict["param_groups"]]
    own_sizes = [len(group["params"]) for group in optimizer.param_groups]
    if saved_sizes != own_sizes:
        raise ValueError(
            f"The checkpoint's optimizer has {saved_sizes} parameters in its groups, {type(optimizer).__name__} of "
            f"configure_optimizers has {own_sizes}. Return the optimizer the checkpoint was saved with."
        )


def load_optimizer_state(optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load whole tensors, the same on every rank, into an optimizer; states become sharded as parameters are."""
    check_groups(optimizer, state_dict)
    keys, own = (
        chain.from_iterable(group["params"] for group in groups)
        for groups in (state_dict["param_groups"], optimizer.param_groups)
    )
    parameters = dict(zip(keys, own, strict=True))
    state = {
        key: _load_state(values, parameters[key], optimizer.state.get(parameters[key], {}))
        if key in parameters
        else values
        for key, values in state_dict["state"].items()
    }
    optimizer.load_state_dict({**state_dict, "state": state})


def is_sharded_state(shape: torch.Size, parameter: Tensor, current: Any) -> bool:
    """Whether a state of this whole shape is sharded as its parameter: not ``step``, nor what is whole now."""
    is_plain_now = isinstance(current, Tensor) and not isinstance(current, DTensor)
    return isinstance(parameter, DTensor) and tuple(shape) == tuple(parameter.shape) and not is_plain_now


def _load_state(values: Mapping[str, Any], parameter: Tensor, current: Mapping[str, Any]) -> dict[str, Any]:
    # copies: a mapped file would be copied page by page at the first step, and stay open
    def load(name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not is_sharded_state(value.shape, parameter, current.get(name)):
            return copy_to_host(value)
        empty = torch.empty_like(parameter, dtype=value.dtype, requires_grad=False)
        assert isinstance(empty, DTensor)
        empty.to_local().copy_(cut_own_shard(value, empty))
        return empty

    return {name: map_leaves(value, partial(load, name)) for name, value in values.items()}


def _placed_like(value: Any, own: Any) -> Any:
    if not (isinstance(value, Tensor) and isinstance(own, DTensor)):
        return value
    # DTensor.from_local would move it to the mesh's device
    return wrap_like(cut_own_shard(value, own).to(own.dtype), own)


def _whole(value: Any, *, keep: bool) -> Any:
    if isinstance(value, DTensor):
        if isinstance(part := local_shard(value), LowBitTensor):
            value = wrap_like(part.decode(), value)
        full: Tensor = value.full_tensor().detach()
        own = value.to_local().untyped_storage().data_ptr()
        is_own = full.untyped_storage().data_ptr() == own  # on one rank it may be the part itself
        return None if not keep else copy_to_host(full) if is_own else full.cpu()
    if isinstance(value, Tensor):
        return copy_to_host(decoded(value)) if keep else None
    return value
