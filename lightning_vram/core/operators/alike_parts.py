"""Work on a large tensor part by part."""

from collections.abc import Iterator

from torch import Tensor

from lightning_vram.private_names.torch.dispatch import FakeTensor

_num_alike = 1


def parts_of(num_rows: int, part_rows: int, tensor: Tensor) -> Iterator[slice]:
    """Yield the rows of each part of ``part_rows`` rows, in order.

    Of a fake tensor, the first part stands for all whole ones: the others would allocate and free the same bytes. The
    loop must free what it has allocated for a part before the next part.
    """
    global _num_alike
    if not isinstance(tensor, FakeTensor):
        yield from (slice(start, min(start + part_rows, num_rows)) for start in range(0, num_rows, part_rows))
        return
    num_whole, rest = divmod(num_rows, part_rows)
    try:
        if num_whole:
            _num_alike = num_whole
            yield slice(0, part_rows)
            _num_alike = 1
        if rest:
            yield slice(num_rows - rest, num_rows)
    finally:
        _num_alike = 1


def num_alike() -> int:
    """Return how many parts the current one stands for."""
    return _num_alike
