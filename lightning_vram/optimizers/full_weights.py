"""What bf16 weights stand for, in a checkpoint that can be loaded anywhere."""

from collections.abc import Iterable
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lightning_vram.optimizers.weight_chunks import WeightChunk


@torch.no_grad()
def put_full_weights(state_dict: dict[str, Any], chunks: Iterable[WeightChunk]) -> dict[str, Any]:
    """Replace each tensor that is the memory of a lean parameter by the exact weights, in host memory.

    Args:
        state_dict: Of a module. Is not changed.
        chunks: Those of the parameters.

    Returns:
        A copy with the same keys in the same order. Names of one parameter share one tensor.
    """
    names: dict[Any, list[str]] = {}
    for name, value in state_dict.items():
        if _is_plain(value) and value.dtype is torch.bfloat16:
            names.setdefault(_memory(value), []).append(name)
    full = copy(state_dict)  # with its metadata
    for chunk in chunks:
        wanted = [names.get(_memory(parameter), []) for parameter in chunk.parameters]
        if not any(wanted):
            continue
        for keys, values in zip(wanted, chunk.views(chunk.read()), strict=True):
            if keys:
                full.update(dict.fromkeys(keys, values.to("cpu", copy=True)))
    return full


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not is_traceable_wrapper_subclass(value)


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape
