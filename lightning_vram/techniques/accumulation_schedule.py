"""How many micro-batches make one optimizer step, over the course of a training.

A schedule is known in advance: the optimizer steps of a whole training are counted without a walk over its batches.
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
        return self._stretch(epoch if self.unit == "epoch" else step)[0]

    def count_steps(self, num_batches: int, num_epochs: int) -> int:
        """Optimizer steps of a whole training; the last window of an epoch may be incomplete."""
        if num_batches == 0:
            return 0
        epoch = step = 0
        while epoch < num_epochs:
            factor, end = self._stretch(epoch if self.unit == "epoch" else step)
            steps_per_epoch = math.ceil(num_batches / factor)
            num_alike = num_epochs - epoch
            if end is not None:
                num_alike = min(num_alike, end - epoch if self.unit == "epoch" else (end - step) // steps_per_epoch)
            step += num_alike * steps_per_epoch
            epoch += num_alike
            if num_alike == 0:  # the factor changes inside of this epoch
                step += self._count_steps_of_epoch(num_batches, step)
                epoch += 1
        return step

    def _count_steps_of_epoch(self, num_batches: int, first_step: int) -> int:
        step = first_step
        while num_batches > 0:
            factor, end = self._stretch(step)
            num_alike = math.ceil(num_batches / factor)
            if end is not None:
                num_alike = min(num_alike, end - step)
            step += num_alike
            num_batches -= num_alike * factor
        return step - first_step

    def _stretch(self, moment: int) -> tuple[int, int | None]:
        """The factor at a moment, and when the next one takes over."""
        index = bisect_right(self.starts, moment)
        factor = self.factors[index - 1] if index else 1
        return factor, self.starts[index] if index < len(self.starts) else None


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
