"""The largest size that fits and that the model takes: found by a law through a few traces, and traced itself."""

import math
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_vram.estimation.size_law import SizeLaw
from lightning_vram.estimation.traced_fit import TracedFit
from lightning_vram.memory.device.out_of_memory import is_out_of_memory
from lightning_vram.private_names.torch.fakes import UNKNOWN_VALUES

_LARGEST = 1 << 24
_EXACT_UP_TO = 512  # larger sizes are found to one part in as many
_MOST_CHECKS = 3
_MOST_LETTERS = 160
_DELIBERATE = (RuntimeError, ValueError, IndexError, MisconfigurationException)  # by operators and refusals of ours
_OWN = "lightning_vram."


@dataclass(frozen=True)
class Limit:
    """Where a search has ended.

    Args:
        size: The largest size; 0 if not even 1 is possible, ``None`` if it is not known.
        refusal: What the model raises at the next size, in one line; empty if memory is the limit.
    """

    size: int | None = None
    refusal: str = ""


def find_limit(
    trace: Callable[[int], TracedFit],
    needed_bytes: Callable[[TracedFit], int],
    limit_bytes: int,
    sizes: Sequence[int],
    first: TracedFit,
) -> Limit:
    """Find the largest size that the model takes and whose need is within a limit.

    Args:
        trace: Runs a step of a size.
        needed_bytes: Says what a run needs. Grows with the size.
        limit_bytes: What there is.
        sizes: To make the law of; the first is that of ``first``. Others take the place of what the model refuses.
        first: The run of the first size.

    Returns:
        The limit; an unknown one if nothing follows from those sizes, or a trace at the size that was found belies it.

    Raises:
        Exception: What a trace raises that is no refusal of the model: see :func:`is_refusal`.
    """
    found = _Sizes(trace, needed_bytes)
    found.needs[sizes[0]] = needed_bytes(first)
    try:
        largest = _expected(found, limit_bytes, sizes, first)
        for _ in range(_MOST_CHECKS):
            if largest and not found.takes(largest):
                largest = found.largest_below(largest)
            if not largest or found.needs[largest] <= limit_bytes:
                return Limit(largest, found.refusals.get(largest + 1, ""))
            largest -= max(1, largest // _EXACT_UP_TO)
    except (_UnknownError, *UNKNOWN_VALUES):
        pass
    return Limit()


class _UnknownError(Exception):
    """Nothing follows from what was run."""


class _Sizes:
    """Which sizes the model takes, and what steps of them need."""

    def __init__(self, trace: Callable[[int], TracedFit], needed_bytes: Callable[[TracedFit], int]) -> None:
        self._trace = trace
        self.needed_bytes = needed_bytes
        self.needs: dict[int, int] = {}
        self.refusals: dict[int, str] = {}

    def takes(self, size: int, runs: dict[int, TracedFit] | None = None) -> bool:
        """Whether the model takes a size, whose run is added to ``runs``."""
        if size in self.refusals or (runs is None and size in self.needs):
            return size in self.needs
        try:
            traced = self._trace(size)
        except Exception as error:
            if not is_refusal(error):
                raise
            self.refusals[size] = _in_a_line(error)
            return False
        self.needs[size] = self.needed_bytes(traced)
        if runs is not None:
            runs[size] = traced
        return True

    def largest_below(self, refused: int) -> int:
        """Return the largest size below a refused one that the model takes: maybe it takes only multiples."""
        taken, step = max((size for size in self.needs if size < refused), default=0), math.gcd(*self.needs)
        if not taken and refused > 1:
            raise _UnknownError
        for probe in (refused // step * step, *(taken << number for number in range(1, _LARGEST.bit_length()))):
            if taken < probe < refused:
                taken, refused = (probe, refused) if self.takes(probe) else (taken, probe)
        while refused - taken > 1:
            unit = step if refused - taken > step else 1
            middle = taken + max(1, (refused - taken) // 2 // unit) * unit
            taken, refused = (middle, refused) if self.takes(middle) else (taken, middle)
        return taken


def is_refusal(error: Exception) -> bool:
    """Whether the run itself has raised: no mistake of this package, and no host whose memory ran out."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    is_own = str(frame.f_globals.get("__name__")).startswith(_OWN)
    return not is_out_of_memory(error) and (not is_own or isinstance(error, _DELIBERATE))


def _in_a_line(error: Exception) -> str:
    line = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    return line if len(line) <= _MOST_LETTERS else line[: _MOST_LETTERS - 3] + "..."


def _expected(found: _Sizes, limit_bytes: int, sizes: Sequence[int], first: TracedFit) -> int:
    """Return the largest size that fits by a law; without one, the first that the model refuses.

    Raises:
        _UnknownError: If nothing follows from the steps.
    """
    start, known = sizes[0], {sizes[0]: first}
    for points in (sizes, (start, start // 2, start // 4), (start, 2 * start, 3 * start)):
        points = points[: len(sizes)]
        if all(point in known or (point and found.takes(point, known)) for point in points):
            with suppress(ValueError):
                law = SizeLaw({point: known[point] for point in points})
                return _bisect(lambda size: found.needed_bytes(law.predict(size)) <= limit_bytes, start)
    refused = [size for size in found.refusals if size > max(known)]
    if not refused:
        raise _UnknownError
    return min(refused)


def _bisect(fits: Callable[[int], bool], start: int) -> int:
    """Return about the largest number that fits, 0 if none does."""
    least, most = 0, start
    while most < _LARGEST and fits(most):
        least, most = most, 2 * most
    while most - least > max(1, least // _EXACT_UP_TO):
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least
