"""Give fakes on the host what the host's kernels return, where PyTorch's own fake kernels return something else.

Statistics of norms of 16-bit inputs are float32 where the norm's weights or statistics are. A gradient that nobody
asked a batch norm for is not made, and that of a group norm has the dtype of its input. The indices of an embedding bag
lie in memory for one more. What is left: the workspace that oneDNN keeps for an LSTM in training, whose size only
oneDNN knows.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.private_names.torch.dispatch import UnwrappedMode
from lightning_vram.private_names.torch.operators import EMBEDDING_BAG

aten = torch.ops.aten
_SUM = 0  # mode of an embedding bag: its fast path keeps no indices
_INDICES = 1  # position among the results of an embedding bag


class HostKernels(UnwrappedMode):
    """Corrects the results of fake operators on the host while it is entered, inside of a fake mode."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

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


_CORRECTIONS: dict[Any, Callable[[Any, tuple[Any, ...]], Any]] = {
    **dict.fromkeys(
        [aten.native_batch_norm.default, aten.native_layer_norm.default, aten.native_group_norm.default],
        _with_float32_statistics,
    ),
    aten.native_batch_norm_backward.default: _with_wanted_gradients,
    aten.native_group_norm_backward.default: _with_gradient_like_input,
    EMBEDDING_BAG: _with_room_for_indices,
}
