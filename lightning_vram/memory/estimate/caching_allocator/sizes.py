"""Sizes that the allocator is built on, and how it rounds requests."""

from collections.abc import Sequence

from lightning_vram.memory.units import MIB

MIN_BLOCK = 512
SMALL = MIB  # the largest request that goes to the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
MIN_LARGE = 10 * MIB  # from here on a segment of its own
ROUND_LARGE = 2 * MIB


def round_up(num_bytes: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-num_bytes // multiple) * multiple


def round_request(num_bytes: int, divisions: Sequence[int] = ()) -> int:
    """Return the size of the block that serves a request."""
    if num_bytes < MIN_BLOCK:
        return MIN_BLOCK
    if divisions:
        interval = num_bytes.bit_length() - MIB.bit_length()
        steps = divisions[min(max(interval, 0), len(divisions) - 1)]
        if steps > 1 and num_bytes > MIN_BLOCK * steps:
            return round_up(num_bytes, (1 << (num_bytes.bit_length() - 1)) // steps)
    return round_up(num_bytes, MIN_BLOCK)


def fixed_segment_bytes(size: int, large_segment_bytes: int = LARGE_SEGMENT) -> int:
    """Return how large a segment is that is made for a block of ``size``."""
    if size <= SMALL:
        return SMALL_SEGMENT
    return large_segment_bytes if size < MIN_LARGE else round_up(size, ROUND_LARGE)
