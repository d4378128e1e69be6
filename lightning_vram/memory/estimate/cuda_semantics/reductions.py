"""What a sum over many rows takes on a card beside its result: partial sums of blocks of threads, megabytes of them.

The gradient of a bias is such a sum. How it is divided is after ``setReduceConfig`` of ATen/native/cuda/Reduce.cuh.
"""

from dataclasses import dataclass, field

from torch import Tensor

_MAX_THREADS = 512
_WARP = 32
_MAX_VECTOR = 4
_MIN_VALUES, _MAX_VALUES = 16, 256  # per thread
_VECTORIZED_FROM = 128


@dataclass(frozen=True)
class Processors:
    """What runs the blocks."""

    number: int  # of multiprocessors
    num_threads: int  # that each can have at once


@dataclass
class _Axes:
    """Dimensions of one kind, fastest first: size and stride, without those of size 1, joined where they can be."""

    sizes: list[int] = field(default_factory=list)
    strides: list[int] = field(default_factory=list)

    @property
    def numel(self) -> int:
        product = 1
        for size in self.sizes:
            product *= size
        return product


def reduction_buffers(x: Tensor, dims: list[int], accumulator_bytes: int, processors: Processors) -> tuple[int, ...]:
    """Return the bytes of partial results and of their semaphores; nothing if each output is made by one block."""
    if not x.numel():
        return ()
    reduced_dims = {dim % x.dim() for dim in dims} or set(range(x.dim()))
    reduced = _axes(x, reduced_dims)
    kept = _axes(x, set(range(x.dim())) - reduced_dims)
    is_fastest = not kept.sizes or (bool(reduced.sizes) and reduced.strides[0] < kept.strides[0])
    vector = 1 if is_fastest else _output_vector(x, reduced, kept)
    width, height = _block(reduced, kept, vector, is_fastest=is_fastest)
    step_input, step_output = (width, 1) if is_fastest else (1, width)
    if _up(reduced.numel, step_input) < min(height * _MIN_VALUES, _MAX_VALUES):
        return ()  # each warp makes outputs of its own
    values = _up(reduced.numel, step_input * height)
    grid = _up(kept.numel // vector, step_output)
    target = processors.number * (processors.num_threads // (width * height))
    if values < _MAX_VALUES or grid > target:
        return ()
    blocks = max(min(_up(target, grid), _up(values, _MIN_VALUES)), _up(values, _MAX_VALUES))
    if blocks == 1:
        return ()
    return accumulator_bytes * kept.numel * blocks * (1 if is_fastest else width * vector), 4 * grid


def _axes(x: Tensor, dims: set[int]) -> _Axes:
    found = sorted((x.stride(dim), x.shape[dim]) for dim in dims if x.shape[dim] != 1)
    axes = _Axes()
    for stride, size in found:
        if axes.sizes and axes.strides[-1] * axes.sizes[-1] == stride:
            axes.sizes[-1] *= size
        else:
            axes.sizes.append(size)
            axes.strides.append(stride)
    return axes


def _output_vector(x: Tensor, reduced: _Axes, kept: _Axes) -> int:
    """How many outputs a thread loads at once."""
    vector = _MAX_VECTOR if kept.strides[0] == 1 else 1
    for number in (x.storage_offset(), kept.sizes[0], *reduced.strides, *kept.strides[1:]):
        while number % vector:
            vector //= 2
    return vector


def _block(reduced: _Axes, kept: _Axes, vector: int, *, is_fastest: bool) -> tuple[int, int]:
    """Width and height of a block of threads."""
    first, second = (reduced.numel, kept.numel) if is_fastest else (kept.numel // vector, reduced.numel)
    if is_fastest and first >= _VECTORIZED_FROM and len(reduced.sizes) == 1 and reduced.strides[0] == 1:
        first //= _MAX_VECTOR
    most = _MAX_THREADS // vector
    first, second = (min(_power_below(number), most) for number in (first, second))
    width = min(first, _WARP)
    height = min(second, most // width)
    return min(first, most // height), height


def _power_below(number: int) -> int:
    return 1 << (max(1, number).bit_length() - 1)


def _up(number: int, divisor: int) -> int:
    return -(-number // divisor)
