"""What bf16 weights stand for, in a checkpoint that can be loaded anywhere."""

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.core.tensors.versions import storage_address
from lightning_vram.optimizers.lean.weight_chunks import WeightChunk
from lightning_vram.private_names.torch.dispatch import is_traceable_wrapper_subclass


@torch.no_grad()
def put_full_weights(
    state_dict: dict[str, Any], chunks: Iterable[WeightChunk], parameters: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """Replace each tensor that is the memory of a lean parameter by the exact weights, in host memory.

    A copy of a lean parameter is replaced, too, where it goes by the parameter's name.

    Args:
        state_dict: Of a module. Is not changed.
        chunks: Those of the parameters.
        parameters: By their names in the module.

    Returns:
        A copy with the same keys in the same order. Names of one parameter share one tensor.
    """
    names: dict[Any, list[str]] = {}
    for name, value in state_dict.items():
        if _is_plain(value) and value.dtype is torch.bfloat16:
            named = parameters.get(name)
            owner = value if named is None or not _is_copy(value, named) else named
            names.setdefault(_memory(owner), []).append(name)
    full = copy(state_dict)  # with its metadata
    for chunk in chunks:
        wanted = [names.get(_memory(parameter), []) for parameter in chunk.parameters]
        if any(wanted):
            full.update(_copy_values(chunk, wanted))
    return full


def _copy_values(chunk: WeightChunk, wanted: Iterable[Sequence[str]]) -> dict[str, Tensor]:
    """Copy the exact weights to host memory, by name. Returning frees the chunk before the next is read."""
    copies = {}
    for keys, values in zip(wanted, chunk.views(chunk.read()), strict=True):
        if keys:
            copies.update(dict.fromkeys(keys, values.to("cpu", copy=True)))
    return copies


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not is_traceable_wrapper_subclass(value)


def _is_copy(value: Tensor, parameter: nn.Parameter) -> bool:
    """Whether both hold the same bits."""
    if value.dtype is not parameter.dtype or value.shape != parameter.shape:
        return False
    return torch.equal(value.to(parameter.device).view(torch.int16), parameter.detach().view(torch.int16))


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, storage_address(tensor), tensor.storage_offset(), tensor.shape
