"""The largest size that fits: found by a law through a few traces, held against one trace more."""

from collections.abc import Callable, Sequence

from lightning_vram.estimation.size_law import SizeLaw
from lightning_vram.estimation.traced_fit import TracedFit

_LARGEST = 1 << 24
_EXACT_UP_TO = 512  # larger sizes are found to one part in as many
_MOST_CHECKS = 3


def largest_that_fits(
    trace: Callable[[int], TracedFit],
    needed_bytes: Callable[[TracedFit], int],
    limit_bytes: int,
    sizes: Sequence[int],
    first: TracedFit,
) -> int | None:
    """Find the largest size whose need is within a limit.

    Args:
        trace: Runs a step of a size.
        needed_bytes: Says what a run needs. Grows with the size.
        limit_bytes: What there is.
        sizes: To make the law of; the first is that of ``first``.
        first: The run of the first size.

    Returns:
        The size; 0 if not even 1 fits; ``None`` if nothing follows from those sizes, or a trace at the size that was
        found belies it.
    """
    known = {sizes[0]: first, **{size: trace(size) for size in sizes[1:]}}
    try:
        law = SizeLaw(known)
    except ValueError:
        return None
    largest = _bisect(lambda size: needed_bytes(law.predict(size)) <= limit_bytes, sizes[0])
    for _ in range(_MOST_CHECKS):
        if largest == 0 or largest in known or needed_bytes(trace(largest)) <= limit_bytes:
            return largest
        largest -= max(1, largest // _EXACT_UP_TO)
    return None


def _bisect(fits: Callable[[int], bool], start: int) -> int:
    """Return about the largest number that fits, 0 if none does."""
    least, most = 0, start
    while most < _LARGEST and fits(most):
        least, most = most, 2 * most
    while most - least > max(1, least // _EXACT_UP_TO):
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least
