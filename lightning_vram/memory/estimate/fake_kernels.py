"""Kernels of operators on fake tensors, where torch has none, or one whose results are not those of the real one."""

from collections.abc import Callable
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lightning_vram.private_names import dispatcher

_aten = torch.ops.aten
_BINCOUNT = _aten.bincount.default
_ALIGNMENT_BYTES = 16  # of each row, on a card
_STEPS = 16, 32  # of time, with which a workspace is measured


def call_fake(func: dispatcher.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call an operator on fake tensors; of a sparse result, values say how many rows it has: that is refused."""
    kernel = _KERNELS.get(func)
    result = func(*args, **kwargs) if kernel is None else kernel(*args, **kwargs)
    if func in _ON_THE_HOST and args[0].is_cpu:  # where torch's own return other tensors than the real ones
        result = _ON_THE_HOST[func](result, args)
    if isinstance(result, dispatcher.FakeTensor) and result.layout is not torch.strided:
        raise dispatcher.DynamicOutputShapeException(func)
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
    shape: tuple[int, ...] = (first.shape[-2], second.shape[-1])
    if first.dim() == second.dim():
        shape = (first.shape[0] if offs is None else offs.shape[0], *shape)
    dtype = out_dtype or first.dtype
    aligned = 1 if first.device.type == "cpu" else _ALIGNMENT_BYTES // dtype.itemsize
    row = -(-shape[-1] // aligned) * aligned
    strides = (shape[-2] * row, row, 1)[-len(shape) :]
    return torch.empty_strided(shape, strides, dtype=dtype, device=first.device)


def _bincount(indices: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """With a least length, as metrics over classes have it, that is the length: classes are within their number."""
    if not minlength:
        raise dispatcher.DynamicOutputShapeException(_BINCOUNT)
    dtype = torch.int64 if weights is None else torch.float32 if weights.dtype is torch.float32 else torch.float64
    return torch.empty(minlength, dtype=dtype, device=indices.device)


_KERNELS: dict[dispatcher.OpOverload, Callable[..., Tensor]] = {
    **{dispatcher.GROUPED_MM: _grouped_mm, _BINCOUNT: _bincount},
    **dict.fromkeys(dispatcher.CTC_BACKWARDS, lambda grad, log_probabilities, *_: torch.empty_like(log_probabilities)),
}


def _with_float32_statistics(results: Any, args: tuple[Any, ...]) -> Any:
    source, *others = args
    dtypes = {other.dtype for other in others if isinstance(other, Tensor)}
    if source.dtype not in (torch.bfloat16, torch.float16) or torch.float32 not in dtypes:
        return results
    result, *statistics = results
    return result, *(torch.empty_like(statistic, dtype=torch.float32) for statistic in statistics)


def _with_gradient_like_input(results: Any, args: tuple[Any, ...]) -> Any:
    gradient, *others = results
    return gradient if gradient is None else gradient.to(args[1].dtype), *others


def _with_workspace(results: Any, args: tuple[Any, ...]) -> Any:
    if not args[-1]:  # in evaluation there is none
        return results
    length, *rest = args[0].shape
    shapes = tuple(tuple(one.shape) for one in args[1:7])
    more_args = tuple(tuple(one) if isinstance(one, list) else one for one in args[7:])
    steps = [min(length, most) for most in _STEPS]
    few, more = (_workspace_bytes((number, *rest), shapes, args[0].dtype, more_args) for number in steps)
    return *results[:-1], results[-1].new_empty(more + (more - few) * (length - steps[1]) // (_STEPS[1] - _STEPS[0]))


@cache
def _workspace_bytes(shape: tuple[int, ...], others: tuple[tuple[int, ...], ...], dtype: torch.dtype, rest: Any) -> int:
    with dispatcher.without_dispatch():
        tensors = [torch.zeros(one, dtype=dtype) for one in (shape, *others)]
        return int(dispatcher.MKLDNN_RNN(*tensors, *rest)[-1].nbytes)


_ON_THE_HOST: dict[Any, Callable[[Any, tuple[Any, ...]], Any]] = {
    _aten.native_batch_norm.default: _with_float32_statistics,
    _aten.native_layer_norm.default: _with_float32_statistics,
    _aten.native_group_norm.default: _with_float32_statistics,
    _aten.native_batch_norm_backward.default: lambda results, args: tuple(
        result if is_wanted else None for result, is_wanted in zip(results, args[-1], strict=True)
    ),
    _aten.native_group_norm_backward.default: _with_gradient_like_input,
    dispatcher.MKLDNN_RNN: _with_workspace,
}
