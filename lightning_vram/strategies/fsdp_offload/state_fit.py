"""Check optimizer states of a checkpoint before they are loaded."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from lightning_vram.optimizers.on_disk.layouts import StateLayout, find_layout, is_elementwise
from lightning_vram.techniques.sharded_checkpoints import parameters_by_name

_WAY_OUT = "Return the optimizer the checkpoint was saved with: the same parameters, in the same order."
_PLAIN = {
    "capturable": False,
    "differentiable": False,
    "foreign": False,
    "fused": False,
}  # the kernel does not change states


def check_states(
    module: nn.Module,
    optimizer: Optimizer,
    states: Sequence[Mapping[str, Any]],
    saved_groups: Sequence[Mapping[str, Any]],
    index: int,
) -> None:
    """Compare shapes, dtypes and names with the parameters; states of unknown optimizers are not checked.

    ``torch.optim`` only counts parameters, but fused kernels trust the shapes: with states of other parameters they
    write out of bounds. ``states``: per parameter in the order of the groups, tensors or metadata of a sharded
    checkpoint; empty without state.
    """
    names = {id(parameter): name for name, parameter in reversed(list(parameters_by_name(module).items()))}
    remaining = iter(states)
    for place, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
        _check_names(group, saved, f"group {place} of optimizer {index}")
        layouts: dict[torch.dtype, StateLayout] = {}
        for number, parameter in enumerate(group["params"]):
            state = next(remaining)
            if state and is_elementwise(type(optimizer)):
                dtype = parameter.dtype
                if dtype not in layouts:
                    layouts[dtype] = find_layout(optimizer, {**group, **saved, **_PLAIN}, dtype)
                name = names.get(id(parameter), f"parameter {number} in group {place}")
                for complaint in _compare(state, parameter, layouts[dtype]):
                    kind = type(optimizer).__name__
                    raise ValueError(
                        f"The checkpoint's state of {name} in optimizer {index} does not suit {kind}: {complaint}. "
                        f"{_WAY_OUT}"
                    )


def in_order(state_dict: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the state of each parameter of an optimizer, in the order of the groups; empty where there is none."""
    keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    return [state_dict["state"].get(key, {}) for key in keys]


def check_form(state_dict: Any, index: int) -> None:
    """Refuse a damaged optimizer state."""
    if not (
        isinstance(state_dict, dict)
        and _are_groups(state_dict.get("param_groups"))
        and isinstance(state_dict.get("state"), dict)
    ):
        raise ValueError(
            f"The checkpoint's state of optimizer {index} lacks 'param_groups' or 'state': the file is damaged. Resume "
            "from another checkpoint."
        )


def _are_groups(groups: Any) -> bool:
    return isinstance(groups, list) and all(
        isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups
    )


def _check_names(group: Mapping[str, Any], saved: Mapping[str, Any], where: str) -> None:
    own_names, saved_names = group.get("param_names"), saved.get("param_names")
    if own_names and saved_names and list(own_names) != list(saved_names):
        own, other = next(pair for pair in zip(own_names, saved_names, strict=True) if pair[0] != pair[1])
        raise ValueError(f"The checkpoint has {other} where {where} has {own}. {_WAY_OUT}")


def _compare(state: Any, parameter: Tensor, layout: StateLayout) -> Iterator[str]:
    if not isinstance(state, dict):
        yield "it is not a dict"
        return
    for name in (*(name for name, _ in layout.elementwise), *layout.others):
        if name not in state:
            yield f"it has no {name}"
    for name, _ in layout.elementwise:
        if state.get(name) is not None:
            yield from _compare_elements(name, state[name], parameter)
    for name in layout.others:
        if state.get(name) is not None and not _is_number(state[name]):
            yield f"its {name} is not a number"


def _compare_elements(name: str, value: Any, parameter: Tensor) -> Iterator[str]:
    found = _shape_and_dtype(value)
    if found is None:
        yield f"its {name} is not a tensor"
        return
    shape, dtype = found
    if shape != tuple(parameter.shape):
        yield f"its {name} has shape {list(shape)}, the parameter {list(parameter.shape)}"
    if dtype.is_complex != parameter.is_complex() or not (dtype.is_complex or dtype.is_floating_point):
        yield f"its {name} has dtype {dtype}, the parameter {parameter.dtype}"


def _is_number(value: Any) -> bool:
    found = _shape_and_dtype(value)
    return math.prod(found[0]) == 1 if found is not None else isinstance(value, int | float)


def _shape_and_dtype(value: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    if isinstance(value, TensorStorageMetadata):
        return tuple(value.size), value.properties.dtype
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else None
