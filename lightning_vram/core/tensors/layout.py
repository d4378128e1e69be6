"""How tensors are stored: the order of their numbers in memory."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

WHOLE_LAYOUT = "lightning_vram_layout"
"""Attribute of a sharded parameter, if it was not contiguous: a meta tensor that is as that was."""


def is_dense(tensor: Tensor) -> bool:
    """Whether the numbers of a strided tensor fill their part of memory, in any order, each in its own place.

    Others are expanded, or slices of larger ones.
    """
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return not tensor.numel()
        expected *= size
    return True


def dense_stride(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a new tensor like this one: its own, and those of a contiguous one where it is expanded."""
    return tensor.stride() if is_dense(tensor) else torch.empty_like(tensor, device="meta").stride()


def flat_as_stored(tensor: Tensor) -> Tensor:
    """Return a flat view of a dense tensor: its numbers in the order in which they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def stored_as(tensor: Tensor, stride: Sequence[int]) -> Tensor:
    """Return ``tensor`` with these strides, which overlap nowhere; itself if it has them."""
    if tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def stored_like(tensor: Tensor, like: Tensor) -> Tensor:
    """Return ``tensor`` with its numbers in the order of a new tensor like ``like``; itself if they are already."""
    if tensor.is_contiguous() and like.is_contiguous():
        return tensor
    stride = dense_stride(like)
    orders = zip(tensor.shape, tensor.stride(), stride, strict=True)
    is_so = all(size == 1 or own == other for size, own, other in orders)
    return tensor if is_so else stored_as(tensor, stride)


def state_stored_like(state: Mapping[str, Any], like: Tensor) -> dict[str, Any]:
    """Return an optimizer's state of a parameter, tensors stored in its order, as fused kernels need it."""
    return {
        key: stored_like(value, like) if type(value) is Tensor and value.shape == like.shape else value
        for key, value in state.items()
    }
