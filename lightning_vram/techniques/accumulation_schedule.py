"""How many micro-batches make one optimizer step, over the course of a training.

A schedule is known in advance, and so are the optimizer steps of a whole training.
"""

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from lightning_vram.argument_checks import check_kind, check_positive_int


@dataclass(frozen=True)
class AccumulationSchedule:
    """Factors by epoch or by optimizer step; 1 before the first."""

    unit: Literal["epoch", "step"]  # what ``starts`` count: epochs, or optimizer steps
    starts: tuple[int, ...]  # from when on each factor holds, ascending
    factors: tuple[int, ...]  # micro-batches per optimizer step, one for each start

    @property
    def largest(self) -> int:
        """The largest factor; a lower bound where the schedule does not begin at 0, since 1 holds before it."""
        return max(self.factors)

    def factor(self, epoch: int, step: int) -> int:
        """Micro-batches of a window that begins in ``epoch``, after ``step`` optimizer steps."""
        index = bisect_right(self.starts, epoch if self.unit == "epoch" else step)
        return self.factors[index - 1] if index else 1

    def count_steps(self, num_batches: int, num_epochs: int) -> int:
        """Optimizer steps of a whole training; the last window of an epoch may be incomplete."""
        step = 0
        for epoch in range(num_epochs):
            num_left = num_batches
            while num_left > 0 and self.unit == "step" and step < self.starts[-1]:  # the factor may change with a step
                num_left -= self.factor(epoch, step)
                step += 1
            step += math.ceil(max(num_left, 0) / self.factor(epoch, step))
        return step


def read_schedule(name: str, unit: Literal["epoch", "step"], factors: Mapping[int, int]) -> AccumulationSchedule:
    """Make a schedule of what the user gave."""
    check_kind(name, factors, Mapping, "a dict such as {0: 8, 4: 4}")
    if not factors:
        raise ValueError(f"{name} must not be empty. {{0: 8}} accumulates 8 micro-batches throughout.")
    for start, factor in factors.items():
        if type(start) is not int:
            raise TypeError(f"{name} must have {unit}s as keys, got {start!r} of type {type(start).__name__}.")
        if start < 0:
            raise ValueError(f"{name} must have {unit}s from 0 on as keys, got {start}.")
        check_positive_int(f"{name}[{start}]", factor)
    if list(factors) != sorted(factors):
        raise ValueError(f"{name} must be in ascending order, got {dict(factors)}: {dict(sorted(factors.items()))}.")
    return AccumulationSchedule(unit, tuple(factors), tuple(factors.values()))
