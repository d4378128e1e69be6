"""The largest size that fits and that the model accepts: predicted from a few traces, then traced itself."""

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, compress
from typing import TypeVar

from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_vram.estimation.traced_fit import TracedFit
from lightning_vram.memory.device.out_of_memory import is_out_of_memory
from lightning_vram.memory.estimate.fakes.known_values import MOST_INTEGERS
from lightning_vram.memory.tracking.ledger import SCRATCH
from lightning_vram.memory.tracking.timeline import MemoryEvent
from lightning_vram.private_names.torch.fakes import UNKNOWN_VALUES

_LARGEST = 1 << 24
_EXACT_UP_TO = 512  # larger sizes are found to one part in as many
_KNOWN_INDICES = 1 << 10, 1 << 13, 1 << 16, MOST_INTEGERS  # as many, or squares or batches of them, are looked at
_MOST_CHECKS = 3
_MOST_LETTERS = 160
_DELIBERATE = (RuntimeError, ValueError, IndexError, MisconfigurationException)  # by operators and refusals of ours
_OWN = "lightning_vram."
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Limit:
    """Where a search has ended."""

    size: int | None = None  # the largest; 0 if not even 1 is possible, ``None`` if it is not known
    refusal: str = ""  # what the model raises at the next size, in one line; empty if memory is the limit


def find_limit(
    trace: Callable[[int], TracedFit],
    needed_bytes: Callable[[TracedFit], int],
    limit_bytes: int,
    sizes: Sequence[int],
    first: TracedFit,
) -> Limit:
    """Find the largest size that the model accepts and whose memory, which grows with it, is within a limit."""
    found = _Sizes(trace, needed_bytes)
    found.needs[sizes[0]] = needed_bytes(first)
    with suppress(*UNKNOWN_VALUES):  # what the fakes cannot tell is not the model's word
        law = found.law(sizes, first)
        largest = min((size for size in found.refusals if size > max(found.needs)), default=None)
        if law is not None:
            largest = _bisect(lambda size: needed_bytes(law.predict(size)) <= limit_bytes, sizes[0])
            climb = (size // sizes[0] * sizes[0] for size in _KNOWN_INDICES)
            largest = next((size for size in climb if sizes[0] < size < largest and not found.takes(size)), largest)
        for _ in range(_MOST_CHECKS):
            if largest and not found.takes(largest):
                largest = found.largest_below(largest)
            if largest is None:
                break
            if not largest or found.needs[largest] <= limit_bytes:
                return Limit(largest, found.refusals.get(largest + 1, ""))
            largest -= max(1, largest // _EXACT_UP_TO)
    return Limit()


class SizeLaw:
    """Predicts runs from runs of other sizes; a ``ValueError`` if those did not do the same."""

    def __init__(self, known: Mapping[int, TracedFit]) -> None:
        self._sizes = tuple(known)
        runs, without_scratch = tuple(known.values()), tuple(map(_without_scratch, known.values()))
        self._runs = next((some for some in (runs, without_scratch) if len(set(map(_shape_of, some))) == 1), ())
        if not self._runs:
            raise ValueError(f"the step differs between the sizes {', '.join(map(str, self._sizes))}")

    def predict(self, size: int) -> TracedFit:
        """Return the run of ``size``."""
        first = self._runs[0]
        weights, divisor = _lagrange(self._sizes, size)
        columns = zip(*(run.timeline.events for run in self._runs), strict=True)
        timeline = replace(first.timeline, events=tuple(_mix(events, weights, divisor) for events in columns))
        return replace(first, timeline=timeline)


def _mix(events: Sequence[MemoryEvent], weights: Sequence[int], divisor: int) -> MemoryEvent:
    first = events[0]
    if all(event.change_bytes == first.change_bytes for event in events):
        return first
    weighted = sum(weight * event.change_bytes for event, weight in zip(events, weights, strict=True))
    return MemoryEvent(first.allocation, (2 * weighted + divisor) // (2 * divisor), first.phase)


def _lagrange(points: Sequence[int], at: int) -> tuple[list[int], int]:
    """Weights of the values at ``points`` in that of the polynomial through them, and what to divide the sum by."""
    weights = []
    for point in points:
        others = [other for other in points if other != point]
        weights.append(math.prod(Fraction(at - other, point - other) for other in others))
    divisor = math.lcm(*(weight.denominator for weight in weights))
    return [int(weight * divisor) for weight in weights], divisor


def _without_scratch(run: TracedFit) -> TracedFit:
    allocations, events = run.timeline.allocations, run.timeline.events
    stays = [not allocations[event.allocation].op.endswith(SCRATCH) for event in events]
    before = list(accumulate(stays, initial=0))  # where each event is now
    timeline = replace(
        run.timeline,
        events=tuple(compress(events, stays)),
        backward_starts=tuple(before[start] for start in run.timeline.backward_starts),
    )
    return replace(
        run, timeline=timeline, spans={name: (before[start], before[end]) for name, (start, end) in run.spans.items()}
    )


def _shape_of(run: TracedFit) -> int:
    """Hash what a run did, without sizes. Allocations count in order of their first event."""
    numbers: dict[int, int] = {}
    allocations = run.timeline.allocations
    steps = []
    for event in run.timeline.events:
        one, number = allocations[event.allocation], numbers.setdefault(event.allocation, len(numbers))
        steps.append((number, one.op, one.device, event.change_bytes > 0, event.phase))
    return hash((*steps, *run.spans.items()))


class _Sizes:
    """Which sizes the model takes, and what steps of them need."""

    def __init__(self, trace: Callable[[int], TracedFit], needed_bytes: Callable[[TracedFit], int]) -> None:
        self._trace = trace
        self._needed_bytes = needed_bytes
        self.needs: dict[int, int] = {}
        self.refusals: dict[int, str] = {}

    def takes(self, size: int, runs: dict[int, TracedFit] | None = None) -> bool:
        """Whether the model takes a size, whose run is added to ``runs``."""
        if size in self.refusals or (runs is None and size in self.needs):
            return size in self.needs
        traced, refusal = attempt(partial(self._trace, size))
        if traced is None:
            self.refusals[size] = refusal
            return False
        self.needs[size] = self._needed_bytes(traced)
        if runs is not None:
            runs[size] = traced
        return True

    def law(self, sizes: Sequence[int], first: TracedFit) -> SizeLaw | None:
        """Return the law of steps of these sizes, or of parts or multiples of the first, if the model takes them."""
        start, runs = sizes[0], {sizes[0]: first}
        for points in (sizes, (start, start // 2, start // 4), (start, 2 * start, 3 * start)):
            points = points[: len(sizes)]
            if all(point in runs or (point and self.takes(point, runs)) for point in points):
                with suppress(ValueError):
                    return SizeLaw({point: runs[point] for point in points})
        return None

    def largest_below(self, refused: int) -> int | None:
        """Return the largest size below a refused one, maybe of multiples only, that is taken; ``None``: unknown."""
        taken, step = max((size for size in self.needs if size < refused), default=0), math.gcd(*self.needs)
        if not taken and refused > 1:
            return None
        probe = refused // step * step
        if taken < probe < refused:
            taken, refused = (probe, refused) if self.takes(probe) else (taken, probe)
        while refused - taken > 1:
            unit = step if refused - taken > step else 1
            middle = taken + max(1, (refused - taken) // 2 // unit) * unit
            taken, refused = (middle, refused) if self.takes(middle) else (taken, middle)
        return taken


def attempt(run: Callable[[], _Result]) -> tuple[_Result | None, str]:
    """Return what a run returns, or ``None`` and, in a line, why the model refuses it. Raises what is no refusal."""
    try:
        return run(), ""
    except UNKNOWN_VALUES:
        raise
    except Exception as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_own = str(frame.f_globals.get("__name__")).startswith(_OWN) and not isinstance(error, _DELIBERATE)
        if is_own or is_out_of_memory(error):
            raise
        line = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    return None, line if len(line) <= _MOST_LETTERS else line[: _MOST_LETTERS - 3] + "..."


def _bisect(fits: Callable[[int], bool], start: int) -> int:
    """Return about the largest number that fits, 0 if none does."""
    least, most = 0, start
    while most < _LARGEST and fits(most):
        least, most = most, 2 * most
    while most - least > max(1, least // _EXACT_UP_TO):
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least
