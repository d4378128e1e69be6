"""The largest size that fits: a straight line through two traces, held against a third."""

from collections.abc import Callable

_MOST_TRACES = 6


def largest_that_fits(
    needed_bytes: Callable[[int], int], limit_bytes: int, size: int, needed_at_size: int, most: int | None = None
) -> int | None:
    """Find the largest size whose need is within a limit.

    What a step needs grows with the batch as a straight line does, up to what the allocator rounds, and faster with
    the length of sequences: each trace draws a new line through the two that lie nearest to the limit.

    Args:
        needed_bytes: Traces a step of a size.
        limit_bytes: What there is.
        size: One that was traced.
        needed_at_size: What that needs.
        most: No larger one is tried.

    Returns:
        The size; 0 if not even 1 fits; ``None`` if it was not found.
    """
    known = {size: needed_at_size}
    trial = size // 2 if size > 1 else 2
    for _ in range(_MOST_TRACES):
        if trial not in known:
            known[trial] = needed_bytes(trial)
        fits = max((n for n, need in known.items() if need <= limit_bytes), default=0)
        fails = min((n for n, need in known.items() if need > limit_bytes and n > fits), default=None)
        if fails is not None and fails - fits == 1:
            return fits
        if most is not None and fits >= most:
            return most
        trial = _next_trial(known, limit_bytes, fits, fails)
        if most is not None:
            trial = min(trial, most)
    return fits or None


def _next_trial(known: dict[int, int], limit_bytes: int, fits: int, fails: int | None) -> int:
    """Where a line through the two sizes nearest to the limit meets it, strictly between what fits and what fails."""
    (first, need_of_first), (second, need_of_second) = sorted(
        sorted(known.items(), key=lambda item: abs(item[1] - limit_bytes))[:2]
    )
    slope = (need_of_second - need_of_first) / (second - first)
    guess = 2 * max(known) if slope <= 0 else int(first + (limit_bytes - need_of_first) / slope)
    if guess <= fits:
        guess = fits + 1
    if fails is not None and guess >= fails:
        guess = max(fits + 1, fails - 1)
    return guess
