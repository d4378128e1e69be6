"""Alternatives when nothing fits, each verified by a traced step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

from lightning_vram.estimation.batches import batch_size_of, sequence_length_of, with_batch_size, with_sequence_length
from lightning_vram.planner.measured import Found, Measured, Workload
from lightning_vram.planner.parts import Part
from lightning_vram.planner.remedies import NOT_ON_HOST, OPTIMIZER_ON_HOST, WEIGHTS_ON_HOST, leaner_on_host
from lightning_vram.planner.scheme import Scheme

SHARDED = Part("lightning_vram.FSDPOffloadStrategy", {"offload": "none"}, place="strategy")
_TRIES = 3


@dataclass(frozen=True)
class Ways:
    """What would make a run fit, each alone; 0 and ``None``: would not, or unknown."""

    num_devices: int = 0  # that share weights, gradients and states
    strategy: Part | None = None  # with weights or states on the host
    host_bytes: int = 0  # peak host memory of the strategy
    free_host_bytes: int | None = None  # available host memory; ``None``: unknown
    batch_size: int = 0  # samples
    sequence_length: int = 0  # tokens


class Steps(Protocol):
    """Traces steps of schemes, also with other batches and on more devices."""

    batch: Any
    num_ranks: int
    own: Mapping[str, Any]

    def __call__(self, scheme: Scheme) -> Measured | None:
        """Trace one; ``None`` if a feature refuses this run."""

    def of(self, batch: Any, num_ranks: int) -> "Steps":
        """Return tracing with another batch, or on more devices."""


def find_ways(steps: Steps, found: Found, workload: Workload, *, has_strategies: bool) -> Ways:
    """Try alternatives to a search: up to ten steps, and three for a small host."""
    least, budget_bytes = found.least_of(workload), workload.budget_bytes
    if least.needed_bytes <= budget_bytes:
        return Ways()  # the host is too small
    num_devices, strategy, batch_size, length = 0, None, 0, 0
    has_tried = any(part.place == "strategy" for one in found.tried for part in one.scheme.parts)
    if has_strategies and not has_tried and least.needed_bytes - least.states_bytes < budget_bytes:
        strategy = _strategy(steps, least, workload)
        num_devices = _num_devices(steps, least, budget_bytes)
    if least.needed_bytes - least.activation_bytes <= budget_bytes:
        size, sequence = batch_size_of(steps.batch) or 0, sequence_length_of(steps.batch) or 0
        of_size = _needed(steps, least, lambda new: with_batch_size(steps.batch, size, new))
        of_length = _needed(steps, least, lambda new: with_sequence_length(steps.batch, sequence, new))
        batch_size = _largest(of_size, size, least, budget_bytes)
        length = _largest(of_length, sequence, least, budget_bytes)
    if strategy is None:
        return Ways(num_devices, batch_size=batch_size, sequence_length=length)
    part = strategy.scheme.parts[0]
    return Ways(num_devices, part, strategy.host_bytes, workload.host_bytes, batch_size, length)


def _strategy(steps: Steps, least: Measured, workload: Workload) -> Measured | None:
    """Return the first strategy that fits device and host, or the one that needs least of the host."""
    best: Measured | None = None
    for mode in (OPTIMIZER_ON_HOST, WEIGHTS_ON_HOST):
        for part in (mode, *leaner_on_host(mode, steps.own)):
            measured = steps(_with(part, least))
            if measured is None:
                continue
            if measured.needed_bytes > workload.budget_bytes:
                break
            best = measured
            if workload.fits_host(measured):
                return measured
        if best is not None:
            return best  # the other one needs as much of the host
    return None


def _num_devices(steps: Steps, least: Measured, budget_bytes: int) -> int:
    """Divide weights, gradients and states; a traced step adds the all-gathered layers."""
    share_bytes: float = budget_bytes - (least.needed_bytes - least.states_bytes)
    number = steps.num_ranks
    for _ in range(_TRIES):
        if share_bytes <= 0:
            return 0
        number = max(ceil(least.states_bytes / share_bytes), number + 1)
        measured = steps.of(steps.batch, number)(_with(SHARDED, least))
        if measured is None:
            return 0
        if measured.needed_bytes <= budget_bytes:
            return number
        share_bytes -= measured.needed_bytes - budget_bytes
    return 0


def _with(strategy: Part, least: Measured) -> Scheme:
    """Combine a strategy, which handles gradients and precision, with callbacks that save activations."""
    parts = (part for part in least.scheme.parts if part.place == "callbacks" and part.name not in NOT_ON_HOST)
    return Scheme((strategy, *parts))


def _needed(steps: Steps, least: Measured, batch_of: Callable[[int], Any]) -> Callable[[int], int]:
    def needed_bytes(size: int) -> int:
        measured = steps.of(batch_of(size), steps.num_ranks)(least.scheme)
        return least.needed_bytes if measured is None else measured.needed_bytes

    return needed_bytes


def _largest(needed_bytes: Callable[[int], int], size: int, least: Measured, budget_bytes: int) -> int:
    """Extrapolate two sizes to one that fits, and verify it; 0 if none was found."""
    best, last, last_bytes, new = 0, size, least.needed_bytes, size // 2
    for _ in range(_TRIES):
        if not 0 < new < size or new in (best, last):
            break
        new_bytes = needed_bytes(new)
        if new_bytes <= budget_bytes:
            best = max(best, new)
        slope = (last_bytes - new_bytes) / (last - new)
        if slope <= 0:
            break
        last, last_bytes, new = new, new_bytes, int(new + (budget_bytes - new_bytes) / slope)
        if new <= best:
            break
    return best
