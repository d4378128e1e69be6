"""Memory that kernels take for a moment: partial sums of reductions, accumulators of attention's backward, places.

cuBLAS's is in ``workspaces.py``, and that of cuDNN's convolutions nobody can foretell.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.memory.estimate.cuda_semantics.reductions import Processors, reduction_buffers
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.estimate.fakes.recorded_reads import is_mask
from lightning_vram.private_names.cuda.attention import efficient_backward, flash_backward
from lightning_vram.private_names.torch.dispatch import ASK_DEVICE, UnwrappedMode
from lightning_vram.private_names.torch.operators import INDEX_PUT, OpOverload, given_arguments

OnScratch = Callable[[str, tuple[int, ...]], None]
_Blocks = tuple[tuple[int, ...], ...]  # one group after the other
_BlocksOf = Callable[[Mapping[str, Any], Processors], _Blocks]

_USUAL_NUMBER = 80
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}
_MOST_THREADS = 2048
_FLOAT_BYTES = 4
_WELFORD_BYTES = 16  # mean, sum of squares and two counts
_INDEX_BYTES = 8
_SORTED = 6  # places as one number, in order, where they were, counted up, and as much as both for the sort
_ROWS = 128  # that flash attention rounds sequences to
_TILE = 64  # rows and columns that efficient attention sums at once
_TILE_BYTES = _TILE * _TILE * _FLOAT_BYTES + 16  # with a lock


class Scratch(UnwrappedMode):
    """Tells of what kernels take beside their results, after each has its results."""

    def __init__(self, card: DeviceSpec, stand_in: torch.device, on_scratch: OnScratch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._processors = Processors(
            card.num_multiprocessors or _USUAL_NUMBER, _THREADS.get(card.capability or (0, 0), _MOST_THREADS)
        )
        self._kind = stand_in.type
        self._on_scratch = on_scratch

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is ASK_DEVICE:
            return args[0].device
        result = func(*args, **(kwargs or {}))
        blocks_of = _BLOCKS.get(func) if isinstance(func, OpOverload) else None
        if blocks_of is not None and args[0].device.type == self._kind:
            given = {**given_arguments(func, args, kwargs or {}), "result": result}
            for sizes in blocks_of(given, self._processors):
                self._on_scratch(str(func), sizes)
        return result


def _reduction(given: Mapping[str, Any], processors: Processors) -> _Blocks:
    return _reduce(given, processors, _FLOAT_BYTES)


def _variance(given: Mapping[str, Any], processors: Processors) -> _Blocks:
    return _reduce(given, processors, _WELFORD_BYTES)


def _reduce(given: Mapping[str, Any], processors: Processors, accumulator_bytes: int) -> _Blocks:
    x: Tensor = given["self"]
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    width = x.element_size() // _FLOAT_BYTES or 1  # sums of 16 bits are of 32
    return (reduction_buffers(x, dims, accumulator_bytes * width, processors),) if x.dim() else ()


def _flash_backward(given: Mapping[str, Any], processors: Processors) -> _Blocks:
    query, key = given["query"], given["key"]
    batch_size, num_heads, length, width = query.shape
    rows = batch_size * num_heads * _round(length, _ROWS)
    sums = (rows * _FLOAT_BYTES, rows * _round(width, 32) * _FLOAT_BYTES)
    if key.shape[1] == num_heads:
        return (sums,)
    return ((*sums, *2 * (key.numel() // key.shape[1] * num_heads * key.element_size(),)),)


def _efficient_backward(given: Mapping[str, Any], processors: Processors) -> _Blocks:
    query: Tensor = given["query"]
    batch_size, num_heads, length, width = query.shape
    tiles = batch_size * num_heads * math.ceil(length / _TILE) * math.ceil(width / _TILE)
    sums = batch_size * num_heads * length * _FLOAT_BYTES, tiles * _TILE_BYTES
    if query.element_size() < _FLOAT_BYTES:  # the kernel multiplies gradients with outputs itself
        return (sums,)
    return (given["grad_out_"].numel() * _FLOAT_BYTES,), sums


def _masked_index(given: Mapping[str, Any], _: Processors) -> _Blocks:
    """Places that masks select, as ``nonzero`` finds them."""
    return ((_place_bytes(given["indices"], given["result"], given["self"].dim()),),)


def _sorted_index_put(given: Mapping[str, Any], _: Processors) -> _Blocks:
    """Places, and what they are sorted with (``index_put_with_sort_kernel`` of ATen/native/cuda/Indexing.cu)."""
    if not given.get("accumulate"):
        return ()
    indices, values = given["indices"], given["values"]
    num_places = values.numel() // max(1, math.prod(given["self"].shape[_num_dims(indices) :]))
    return ((_place_bytes(indices, values, given["self"].dim()), *_SORTED * (num_places * _INDEX_BYTES,)),)


def _place_bytes(indices: Sequence[Tensor | None], selected: Tensor, num_dims: int) -> int:
    num_masked = sum(one.dim() for one in indices if one is not None and is_mask(one))
    first = next(place for place, one in enumerate(indices) if one is not None)
    return num_masked * (selected.shape[first] if first < min(selected.dim(), num_dims) else 1) * _INDEX_BYTES


def _num_dims(indices: Sequence[Tensor | None]) -> int:
    """Return how many dimensions are indexed: a mask stands for all of its own."""
    return sum(one.dim() if one is not None and is_mask(one) else 1 for one in indices)


def _round(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


_aten = torch.ops.aten
_BLOCKS: dict[Any, _BlocksOf] = {
    **dict.fromkeys(
        (
            *(_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim),
            *(_aten.linalg_vector_norm.default, _aten.prod.default, _aten.prod.dim_int),
        ),
        _reduction,
    ),
    **dict.fromkeys((_aten.var.correction, _aten.var_mean.correction, _aten.std.correction), _variance),
    _aten.index.Tensor: _masked_index,
    **dict.fromkeys((_aten.index_put.default, _aten.index_put_.default, INDEX_PUT), _sorted_index_put),
    flash_backward: _flash_backward,
    efficient_backward: _efficient_backward,
}
