"""Correct fakes on the host where PyTorch's fake kernels return other tensors than the real ones."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.private_names.torch.dispatch import UnwrappedMode, without_dispatch
from lightning_vram.private_names.torch.operators import EMBEDDING_BAG, MKLDNN_RNN

aten = torch.ops.aten
_SUM = 0  # mode of an embedding bag: its fast path keeps no indices
_STEPS = 16, 32  # of time, with which a workspace is measured
_INDICES = 1  # position among the results of an embedding bag


class HostKernels(UnwrappedMode):  # type: ignore[no-untyped-call]
    """Corrects the results of fake operators on the host while it is entered, inside of a fake mode."""

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        correct = _CORRECTIONS.get(func)
        return correct(results, args) if correct is not None and args[0].is_cpu else results


def _with_float32_statistics(results: Any, args: tuple[Any, ...]) -> Any:
    source, *others = args
    dtypes = {other.dtype for other in others if isinstance(other, Tensor)}
    if source.dtype not in (torch.bfloat16, torch.float16) or torch.float32 not in dtypes:
        return results
    result, *statistics = results
    return result, *(torch.empty_like(statistic, dtype=torch.float32) for statistic in statistics)


def _with_wanted_gradients(results: Any, args: tuple[Any, ...]) -> Any:
    return tuple(result if is_wanted else None for result, is_wanted in zip(results, args[-1], strict=True))


def _with_gradient_like_input(results: Any, args: tuple[Any, ...]) -> Any:
    gradient, *others = results
    return gradient if gradient is None else gradient.to(args[1].dtype), *others


def _with_room_for_indices(results: Any, args: tuple[Any, ...]) -> Any:
    mode = args[4] if len(args) > 4 else _SUM
    if mode == _SUM:
        return results
    indices = results[_INDICES]
    room = indices.new_empty(indices.numel() + 1)
    return *results[:_INDICES], room[:-1], *results[_INDICES + 1 :]


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
    with without_dispatch():
        tensors = [torch.zeros(one, dtype=dtype) for one in (shape, *others)]
        return int(MKLDNN_RNN(*tensors, *rest)[-1].nbytes)


_CORRECTIONS: dict[Any, Callable[[Any, tuple[Any, ...]], Any]] = {
    **dict.fromkeys(
        [aten.native_batch_norm.default, aten.native_layer_norm.default, aten.native_group_norm.default],
        _with_float32_statistics,
    ),
    aten.native_batch_norm_backward.default: _with_wanted_gradients,
    aten.native_group_norm_backward.default: _with_gradient_like_input,
    EMBEDDING_BAG: _with_room_for_indices,
    MKLDNN_RNN: _with_workspace,
}
