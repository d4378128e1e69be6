"""Operators that give indices, and how large those can be: autograd saves them as 64-bit integers."""

import math
from collections.abc import Callable
from typing import Any

import torch

from lightning_vram.private_names.torch.operators import schema_of

aten = torch.ops.aten

LargestIndex = Callable[[tuple[Any, ...], dict[str, Any] | None], int]

# Windows of pools: an index counts the elements of one channel of the input.
_POOLS = {
    "max_pool2d_with_indices": 2,
    "max_pool3d_with_indices": 3,
    "adaptive_max_pool2d": 2,
    "adaptive_max_pool3d": 3,
    "fractional_max_pool2d": 2,
    "fractional_max_pool3d": 3,
}
_ALONG_A_DIM = "max.dim min.dim sort.default sort.stable topk.default kthvalue.default median.dim nanmedian.dim "
_ALONG_A_DIM += "mode.default cummax.default cummin.default argmax.default argmin.default argsort.stable"


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(aten, packet, None), overload or "default", None)


def _of_pool(num_dims: int) -> LargestIndex:
    return lambda args, kwargs: math.prod(args[0].shape[-num_dims:]) - 1


def _of_dim(function: Any) -> LargestIndex:
    arguments = schema_of(function).arguments
    position = next(i for i, argument in enumerate(arguments) if argument.name == "dim")

    def largest(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> int:
        given = args[position] if position < len(args) else (kwargs or {}).get("dim", arguments[position].default_value)
        tensor = args[0]
        if given is None or tensor.dim() == 0:
            return int(tensor.numel()) - 1
        return int(tensor.shape[given]) - 1

    return largest


LARGEST_INDEX: dict[Any, LargestIndex] = {
    **{_overload(name): _of_pool(num_dims) for name, num_dims in _POOLS.items() if _overload(name) is not None},
    **{_overload(name): _of_dim(_overload(name)) for name in _ALONG_A_DIM.split() if _overload(name) is not None},
}
"""By operator: the largest index that a call gives. Its indices are its last result."""
