"""Scratch memory of kernels: partial sums of reductions, accumulators of attention's backward, indices."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.estimate.fakes.recorded_reads import is_mask
from lightning_vram.private_names.cuda.attention import efficient_backward, flash_backward
from lightning_vram.private_names.torch.dispatch import ASK_DEVICE, UnwrappedMode
from lightning_vram.private_names.torch.operators import INDEX_PUT, OpOverload, given_arguments

OnScratch = Callable[[str, tuple[int, ...]], None]  # gets an operator's name, and the bytes of each block
_Blocks = tuple[tuple[int, ...], ...]  # one group after the other

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
_MAX_BLOCK_THREADS = 512
_WARP = 32
_MAX_VECTOR = 4
_MIN_VALUES, _MAX_VALUES = 16, 256  # per thread
_VECTORIZED_FROM = 128


class Processors(NamedTuple):
    """How many multiprocessors run the blocks, and the threads that each can have at once."""

    number: int
    num_threads: int


class Scratch(UnwrappedMode):
    """Reports what kernels take in addition to their results, after each has its results."""

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


def _reduce(accumulator_bytes: int, given: Mapping[str, Any], processors: Processors) -> _Blocks:
    x: Tensor = given["self"]
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else list(dims or ())
    width = x.element_size() // _FLOAT_BYTES or 1  # sums of 16 bits are of 32
    return (reduction_buffers(x, dims, accumulator_bytes * width, processors),) if x.dim() else ()


def _flash_backward(given: Mapping[str, Any], processors: Processors) -> _Blocks:
    query, key = given["query"], given["key"]
    batch_size, num_heads, length, width = query.shape
    rows = batch_size * num_heads * _up(length, _ROWS) * _ROWS
    sums = (rows * _FLOAT_BYTES, rows * _up(width, 32) * 32 * _FLOAT_BYTES)
    if key.shape[1] == num_heads:
        return (sums,)
    return ((*sums, *2 * (key.numel() // key.shape[1] * num_heads * key.element_size(),)),)


def _efficient_backward(given: Mapping[str, Any], processors: Processors) -> _Blocks:
    query: Tensor = given["query"]
    batch_size, num_heads, length, width = query.shape
    tiles = batch_size * num_heads * _up(length, _TILE) * _up(width, _TILE)
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
    num_places = values.numel() // max(1, prod(given["self"].shape[_num_dims(indices) :]))
    return ((_place_bytes(indices, values, given["self"].dim()), *_SORTED * (num_places * _INDEX_BYTES,)),)


def _place_bytes(indices: Sequence[Tensor | None], selected: Tensor, num_dims: int) -> int:
    num_masked = sum(one.dim() for one in indices if one is not None and is_mask(one))
    first = next(place for place, one in enumerate(indices) if one is not None)
    return num_masked * (selected.shape[first] if first < min(selected.dim(), num_dims) else 1) * _INDEX_BYTES


def _num_dims(indices: Sequence[Tensor | None]) -> int:
    """Return how many dimensions are indexed: a mask stands for all of its own."""
    return sum(one.dim() if one is not None and is_mask(one) else 1 for one in indices)


_aten = torch.ops.aten
_SUMS = (
    *(_aten.sum.default, _aten.sum.dim_IntList, _aten.mean.default, _aten.mean.dim),
    *(_aten.linalg_vector_norm.default, _aten.prod.default, _aten.prod.dim_int),
)
_VARIANCES = (_aten.var.correction, _aten.var_mean.correction, _aten.std.correction)
_BLOCKS: dict[Any, Callable[[Mapping[str, Any], Processors], _Blocks]] = {
    **dict.fromkeys(_SUMS, partial(_reduce, _FLOAT_BYTES)),
    **dict.fromkeys(_VARIANCES, partial(_reduce, _WELFORD_BYTES)),
    _aten.index.Tensor: _masked_index,
    **dict.fromkeys((_aten.index_put.default, _aten.index_put_.default, INDEX_PUT), _sorted_index_put),
    flash_backward: _flash_backward,
    efficient_backward: _efficient_backward,
}

_Axes = list[tuple[int, int]]  # stride and size, fastest first, without sizes of 1, joined where they can be


def reduction_buffers(x: Tensor, dims: list[int], accumulator_bytes: int, processors: Processors) -> tuple[int, ...]:
    """Return the bytes of partial results and of their semaphores; nothing if each output is made by one block."""
    if not x.numel():
        return ()
    reduced_dims = {dim % x.dim() for dim in dims} or set(range(x.dim()))
    reduced = _axes(x, reduced_dims)
    kept = _axes(x, set(range(x.dim())) - reduced_dims)
    num_reduced, num_kept = (prod(size for _, size in axes) for axes in (reduced, kept))
    is_fastest = not kept or (bool(reduced) and reduced[0][0] < kept[0][0])
    vector = 1 if is_fastest else _output_vector(x, reduced, kept)
    first, second = (num_reduced, num_kept) if is_fastest else (num_kept // vector, num_reduced)
    if is_fastest and first >= _VECTORIZED_FROM and len(reduced) == 1 and reduced[0][0] == 1:
        first //= _MAX_VECTOR
    width, height = _block(first, second, _MAX_BLOCK_THREADS // vector)
    step_input, step_output = (width, 1) if is_fastest else (1, width)
    if _up(num_reduced, step_input) < min(height * _MIN_VALUES, _MAX_VALUES):
        return ()  # each warp makes outputs of its own
    values = _up(num_reduced, step_input * height)
    grid = _up(num_kept // vector, step_output)
    target = processors.number * (processors.num_threads // (width * height))
    if values < _MAX_VALUES or grid > target:
        return ()
    blocks = max(min(_up(target, grid), _up(values, _MIN_VALUES)), _up(values, _MAX_VALUES))
    if blocks == 1:
        return ()
    return accumulator_bytes * num_kept * blocks * (1 if is_fastest else width * vector), 4 * grid


def _axes(x: Tensor, dims: set[int]) -> _Axes:
    axes: _Axes = []
    for stride, size in sorted((x.stride(dim), x.shape[dim]) for dim in dims if x.shape[dim] != 1):
        if axes and prod(axes[-1]) == stride:
            axes[-1] = axes[-1][0], axes[-1][1] * size
        else:
            axes.append((stride, size))
    return axes


def _output_vector(x: Tensor, reduced: _Axes, kept: _Axes) -> int:
    (stride, size), *others = kept
    vector = _MAX_VECTOR if stride == 1 else 1
    for number in (x.storage_offset(), size, *(one for one, _ in chain(reduced, others))):
        while number % vector:
            vector //= 2
    return vector


def _block(first: int, second: int, most: int) -> tuple[int, int]:
    first, second = (min(1 << (max(1, number).bit_length() - 1), most) for number in (first, second))
    height = min(second, most // min(first, _WARP))
    return min(first, most // height), height


def _up(number: int, divisor: int) -> int:
    return -(-number // divisor)
