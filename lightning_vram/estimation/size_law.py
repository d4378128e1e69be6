"""A step of another size, out of steps of some: every change of bytes is a polynomial of the size.

Of the first degree in the batch: each tensor has a batch dimension or has none. Of the second in the length of
sequences, where attention keeps its weights. What kernels take for a moment follows no such law: a reduction cuts its
work in more parts, or none, as there is more of it. Where runs differ in nothing else, it is left out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, compress
from math import lcm, prod

from lightning_vram.estimation.traced_fit import TracedFit
from lightning_vram.memory.tracking.ledger import SCRATCH
from lightning_vram.memory.tracking.timeline import MemoryEvent


class SizeLaw:
    """Predicts runs from runs of other sizes.

    Raises:
        ValueError: If they did not do the same: then nothing follows for others.
    """

    def __init__(self, known: Mapping[int, TracedFit]) -> None:
        self._sizes = tuple(known)
        runs, without_scratch = tuple(known.values()), tuple(map(_without_scratch, known.values()))
        self._runs = next((some for some in (runs, without_scratch) if _are_alike(some)), ())
        if not self._runs:
            raise ValueError(f"the step does other things at the sizes {', '.join(map(str, self._sizes))}")

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
        weights.append(Fraction(prod(at - other for other in others), prod(point - other for other in others)))
    divisor = lcm(*(weight.denominator for weight in weights))
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


def _are_alike(runs: Sequence[TracedFit]) -> bool:
    return len(set(map(_shape_of, runs))) == 1


def _shape_of(run: TracedFit) -> int:
    """A number that tells runs apart that did not do the same. Allocations count in order of their first event."""
    numbers: dict[int, int] = {}
    allocations = run.timeline.allocations
    events = tuple(
        (
            numbers.setdefault(event.allocation, len(numbers)),
            allocations[event.allocation].op,
            allocations[event.allocation].device,
            event.change_bytes > 0,
            event.phase,
        )
        for event in run.timeline.events
    )
    return hash((events, tuple(run.spans.items())))
