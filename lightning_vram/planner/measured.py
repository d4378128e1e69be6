"""What steps of schemes need, and what is available."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lightning_vram.estimation.step_time import StepTime
from lightning_vram.optimizers.on_host import margin_bytes
from lightning_vram.planner.scheme import Scheme


@dataclass(frozen=True)
class Measured:
    """Memory and time of a step of one configuration."""

    scheme: Scheme  # the configuration that was traced
    needed_bytes: int  # device memory
    activation_bytes: int  # peak of activations
    time: StepTime  # of the step, modelled
    states_bytes: int = 0  # weights, gradients and optimizer state at the peak
    peak: str = ""  # its place, in a few words
    layers: str = ""  # table of the decisions per layer, for a budget
    host_bytes: int = 0  # peak of a strategy on the host of a node

    @property
    def seconds(self) -> float:
        """Modelled step time in seconds."""
        return self.time.seconds


@dataclass(frozen=True)
class Workload:
    """Budgets and batch of a plan."""

    budget_bytes: int  # device memory
    batch_size: int = 0  # N of the batch; 0: unknown
    # D2H bytes during the forward of a step of so many seconds
    travel_bytes: Callable[[float], int] = field(default=lambda seconds: 0)
    host_bytes: int | None = None  # host memory of a node; ``None``: unknown

    def fits(self, measured: Measured) -> bool:
        """Whether a step fits device and host."""
        return measured.needed_bytes <= self.budget_bytes and self.fits_host(measured)

    def fits_host(self, measured: Measured) -> bool:
        """Whether it fits the host, including memory that must stay free."""
        return self.host_bytes is None or with_margin(measured.host_bytes) <= self.host_bytes


@dataclass(frozen=True)
class Found:
    """The result of a search."""

    best: Measured | None  # the fastest that fits, if any
    plain: Measured  # the baseline
    tried: tuple[Measured, ...]  # all traced steps, in order

    @property
    def taken(self) -> Measured:
        """The best, or what needs least."""
        return self.best or self.least

    @property
    def least(self) -> Measured:
        """The step that needs least."""
        return min(self.tried, key=lambda measured: measured.needed_bytes)

    def least_of(self, workload: Workload) -> Measured:
        """Return the nearest to fit: if something fits the device, what needs least of the host."""
        for_device = [one for one in self.tried if one.needed_bytes <= workload.budget_bytes]
        return min(for_device, key=lambda measured: measured.host_bytes, default=self.least)

    @property
    def unbeaten(self) -> tuple[Measured, ...]:
        """The Pareto front of memory and time, the fastest first."""
        found: list[Measured] = []
        for one in sorted(self.tried, key=lambda one: (one.seconds, one.needed_bytes)):
            if not found or one.needed_bytes < found[-1].needed_bytes:
                found.append(one)
        return tuple(found)


Measure = Callable[[Scheme], Measured | None]  # traces a step; ``None``: a feature refuses the run


def find_measured(scheme: Scheme, tried: Iterable[Measured]) -> Measured | None:
    """Return the step of a scheme, if it was traced."""
    return next((one for one in tried if one.scheme == scheme), None)


def with_margin(host_bytes: int) -> int:
    """Return the host memory that a run needs, including what must stay free."""
    return host_bytes + margin_bytes(host_bytes)
