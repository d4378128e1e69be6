"""What steps of schemes take, and what there is for them."""

from collections.abc import Callable
from dataclasses import dataclass, field

from lightning_vram.estimation.step_time import StepTime
from lightning_vram.optimizers.on_host import margin_bytes
from lightning_vram.planner.scheme import Scheme


@dataclass(frozen=True)
class Measured:
    """Memory and time of a step of one configuration."""

    scheme: Scheme  # the configuration that was traced
    needed_bytes: int  # device memory
    activation_bytes: int  # the most that activations took at once
    time: StepTime  # of the step, in the model's own measure
    states_bytes: int = 0  # weights, gradients and states of optimizers when the peak is reached
    peak: str = ""  # where that is, in a few words
    layers: str = ""  # what each layer does, as a table, where a budget was planned for
    host_bytes: int = 0  # what a strategy has at rest on the host of a node, at most

    @property
    def seconds(self) -> float:
        """Modelled step time in seconds."""
        return self.time.seconds


@dataclass(frozen=True)
class Workload:
    """What a plan is for."""

    budget_bytes: int  # what there is
    batch_size: int = 0  # N, of the batch; 0 if nobody knows
    # what the bus carries to the host while a forward runs, of a step that takes so many seconds
    travel_bytes: Callable[[float], int] = field(default=lambda seconds: 0)
    host_bytes: int | None = None  # what a node's host has; ``None``: nobody knows

    def fits(self, measured: Measured) -> bool:
        """Whether there is as much as a step needs."""
        return measured.needed_bytes <= self.budget_bytes and self.fits_host(measured)

    def fits_host(self, measured: Measured) -> bool:
        """Whether the host has as much, and what must stay free there."""
        return self.host_bytes is None or with_margin(measured.host_bytes) <= self.host_bytes


@dataclass(frozen=True)
class Found:
    """What a search has found."""

    best: Measured | None  # the fastest that fits; ``None`` if nothing does
    plain: Measured  # the step as it is
    tried: tuple[Measured, ...]  # all that was run, in order

    @property
    def taken(self) -> Measured:
        """What is run: the best, else what needs least."""
        return self.best or self.least

    @property
    def least(self) -> Measured:
        """What needs least of all that was run."""
        return min(self.tried, key=lambda measured: measured.needed_bytes)

    def least_of(self, workload: Workload) -> Measured:
        """Return what comes nearest: where there is something for the device, what needs least of the host."""
        for_device = [one for one in self.tried if one.needed_bytes <= workload.budget_bytes]
        return min(for_device, key=lambda measured: measured.host_bytes, default=self.least)

    @property
    def unbeaten(self) -> tuple[Measured, ...]:
        """What nothing else beats in memory and time at once, from the fastest to the leanest."""
        found: list[Measured] = []
        for one in sorted(self.tried, key=lambda one: (one.seconds, one.needed_bytes)):
            if not found or one.needed_bytes < found[-1].needed_bytes:
                found.append(one)
        return tuple(found)


Measure = Callable[[Scheme], Measured | None]
"""Runs a step of a scheme; ``None``: a part of it refuses the run."""


def with_margin(host_bytes: int) -> int:
    """Return what a host must have for a run that has so much at rest there."""
    return host_bytes + margin_bytes(host_bytes)
