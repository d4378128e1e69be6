"""Operators whose fake kernel, in the versions of torch that are supported, refuses what the real one takes."""

from collections.abc import Callable
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lightning_vram.private_names.torch.dispatch import FakeTensor
from lightning_vram.private_names.torch.fakes import GROUPED_MM, DynamicOutputShapeException
from lightning_vram.private_names.torch.operators import CTC_BACKWARDS, SPARSE_OF_PARTS, OpOverload

_BINCOUNT = torch.ops.aten.bincount.default
_ALIGNMENT_BYTES = 16  # of each row, on a card


def call_fake(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator on fake tensors; of a sparse result, values say how many rows it has: that is refused."""
    kernel = _KERNELS.get(func)
    result = func(*args, **kwargs) if kernel is None else kernel(*args, **kwargs)
    is_sparse = isinstance(result, FakeTensor) and result.layout is not torch.strided
    if is_sparse and func is not SPARSE_OF_PARTS:
        raise DynamicOutputShapeException(func)
    return result


def pad_packed_sequence(
    data: Tensor,
    batch_sizes: Tensor,
    batch_first: bool,  # noqa: FBT001 - as torch has it
    padding_value: float,
    total_length: int,
) -> tuple[Tensor, Tensor]:
    """Pad packed sequences with the operators that C++ calls: it writes lengths, and fakes have no memory."""
    sizes = [int(size) for size in batch_sizes]
    length, offset, start = max(total_length, len(sizes)), 0, 0
    padded = data.new_full((length, sizes[0], *data.shape[1:]), padding_value)
    for size, steps in groupby(sizes):
        num_steps = sum(1 for _ in steps)
        part = data[offset : offset + num_steps * size].view(num_steps, size, *data.shape[1:])
        padded[start : start + num_steps, :size].copy_(part)
        offset, start = offset + num_steps * size, start + num_steps
    lengths = torch.tensor([sum(size > place for size in sizes) for place in range(sizes[0])])
    return padded.transpose(0, 1) if batch_first else padded, lengths


def _grouped_mm(
    first: Tensor, second: Tensor, offs: Tensor | None = None, bias: Any = None, out_dtype: Any = None
) -> Tensor:
    """Matrices of a mixture of experts: torch's takes bf16 only, the real ones take fp16 and fp32 as well."""
    num_groups = first.shape[0] if offs is None else offs.shape[0]
    shape: tuple[int, ...] = (first.shape[-2], second.shape[-1])
    if first.dim() == second.dim():
        shape = (num_groups, *shape)
    dtype = out_dtype or first.dtype
    aligned = 1 if first.device.type == "cpu" else _ALIGNMENT_BYTES // dtype.itemsize
    row = -(-shape[-1] // aligned) * aligned
    strides = (shape[-2] * row, row, 1)[-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=dtype, device=first.device)


def _bincount(indices: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """With a least length, as metrics over classes have it, that is the length: classes are within their number."""
    if not minlength:
        raise DynamicOutputShapeException(_BINCOUNT)
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    return torch.empty(minlength, dtype=dtype, device=indices.device)


def _ctc_backward(grad: Tensor, log_probabilities: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(log_probabilities)


_KERNELS: dict[OpOverload, Callable[..., Tensor]] = {
    **{GROUPED_MM: _grouped_mm, _BINCOUNT: _bincount},
    **dict.fromkeys(CTC_BACKWARDS, _ctc_backward),
}
