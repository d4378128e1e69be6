"""Alternatives when nothing fits, each verified by a traced step."""

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Any

from lightning_vram.estimation.batches import batch_size_of, sequence_length_of, with_batch_size, with_sequence_length
from lightning_vram.memory.tracking.timeline import MemoryTimeline, Phase
from lightning_vram.memory.units import format_argument, format_bytes
from lightning_vram.planner.remedies import NOT_ON_HOST, OPTIMIZER_ON_HOST, WEIGHTS_ON_HOST, leaner_on_host
from lightning_vram.planner.scheme import LEVELS, Exactness, Found, Measured, Part, Scheme, Workload, with_margin

if TYPE_CHECKING:
    from lightning_vram.planner.plan import TracedSteps

SHARDED = Part("lightning_vram.FSDPOffloadStrategy", {"offload": "none"}, place="strategy")
_TRIES = 3


@dataclass(frozen=True)
class Alternatives:
    """What would make a run fit, each alone; 0 and ``None``: would not, or unknown."""

    num_devices: int = 0  # that share weights, gradients and states
    strategy: Part | None = None  # with weights or states on the host
    host_bytes: int = 0  # peak host memory of the strategy
    free_host_bytes: int | None = None  # available host memory; ``None``: unknown
    batch_size: int = 0  # samples
    sequence_length: int = 0  # tokens


def suggest_alternatives(
    steps: "TracedSteps", found: Found, workload: Workload, *, has_strategies: bool
) -> Alternatives:
    """Try alternatives to a search: up to ten steps, and three for a small host."""
    least, budget_bytes = found.least_of(workload), workload.budget_bytes
    if least.needed_bytes <= budget_bytes:
        return Alternatives()  # the host is too small
    num_devices, strategy, batch_size, length = 0, None, 0, 0
    has_tried = any(part.place == "strategy" for one in found.tried for part in one.scheme.parts)
    if has_strategies and not has_tried and least.needed_bytes - least.states_bytes < budget_bytes:
        strategy = _strategy(steps, least, workload)
        num_devices = _num_devices(steps, least, budget_bytes)
    if least.needed_bytes - least.activation_bytes <= budget_bytes:
        batch_size = _largest(steps, least, budget_bytes, batch_size_of(steps.batch) or 0, with_batch_size)
        length = _largest(steps, least, budget_bytes, sequence_length_of(steps.batch) or 0, with_sequence_length)
    if strategy is None:
        return Alternatives(num_devices, batch_size=batch_size, sequence_length=length)
    part = strategy.scheme.parts[0]
    return Alternatives(num_devices, part, strategy.host_bytes, workload.host_bytes, batch_size, length)


def _strategy(steps: "TracedSteps", least: Measured, workload: Workload) -> Measured | None:
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


def _num_devices(steps: "TracedSteps", least: Measured, budget_bytes: int) -> int:
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


def _largest(
    steps: "TracedSteps", least: Measured, budget_bytes: int, size: int, resize: Callable[[Any, int, int], Any]
) -> int:
    """Extrapolate two sizes to one that fits, and verify it; 0 if none was found."""
    best, last, last_bytes, new = 0, size, least.needed_bytes, size // 2
    for _ in range(_TRIES):
        if not 0 < new < size or new in (best, last):
            break
        measured = steps.of(resize(steps.batch, size, new), steps.num_ranks)(least.scheme)
        new_bytes = least.needed_bytes if measured is None else measured.needed_bytes
        if new_bytes <= budget_bytes:
            best = max(best, new)
        slope = (last_bytes - new_bytes) / (last - new)
        if slope <= 0:
            break
        last, last_bytes, new = new, new_bytes, int(new + (budget_bytes - new_bytes) / slope)
        if new <= best:
            break
    return best


def describe_alternatives(
    least: Measured, level: Exactness, ways: Alternatives, device_bytes: int | None = None, *, on_host: bool = False
) -> str:
    """Return what would help; a larger budget only if the device has that much, or is unknown."""
    name, num_bytes = ("host_memory", with_margin(least.host_bytes)) if on_host else ("budget", least.needed_bytes)
    helps = [f"{name}='{format_argument(num_bytes, round_up=True)}'"]
    if not on_host and device_bytes is not None and num_bytes > device_bytes:
        helps = [f"a device with {format_bytes(num_bytes)}"]
    if on_host:
        helps.append("FSDPOffloadStrategy(nvme_path='/a/fast/disk'), which keeps optimizer state on disk")
    if ways.strategy is not None:
        helps.append(f"strategy={_code_of(ways.strategy)} ({_on_host(ways)})")
    if ways.num_devices:
        helps.append(f"{ways.num_devices} devices with FSDPOffloadStrategy(offload='none')")
    if ways.batch_size:
        helps.append(f"batch size {ways.batch_size} with accumulate_grad_batches")
    if ways.sequence_length:
        helps.append(f"sequence length {ways.sequence_length}")
    names = [repr(name) for name, other in LEVELS.items() if other > level]
    if names:
        helps.append(f"perhaps allow={' or '.join(names)}")
    return f"What helps: {', or '.join(filter(None, (', '.join(helps[:-1]), helps[-1])))}."


def describe_peak_place(least: Measured) -> str:
    """Return the place of the peak, if known, after a comma."""
    return f", {least.peak}" if least.peak else ""


def peak_words(timeline: MemoryTimeline) -> str:
    """Return the place of the peak of a run: phase, and module with the largest share."""
    if timeline.peak_phase is None:
        return ""
    phase = "optimizer step" if timeline.peak_phase is Phase.OPTIMIZER_STEP else str(timeline.peak_phase)
    held = next(((name, size) for name, size in timeline.peak_by_module.items() if name), None)
    largest = "" if held is None else f", mostly for '{held[0]}' ({format_bytes(held[1])})"
    return f"in the {phase}{largest}"


def _code_of(strategy: Part) -> str:
    """Return a strategy as an argument of a Trainer, by its name if it has one."""
    if strategy in (OPTIMIZER_ON_HOST, WEIGHTS_ON_HOST):
        return "'fsdp_offload'" if strategy == WEIGHTS_ON_HOST else "'fsdp_offload_optimizer'"
    return f"{strategy.name}({', '.join(f'{name}={value!r}' for name, value in strategy.init_args.items())})"


def _on_host(ways: Alternatives) -> str:
    """Return the host memory of a strategy, and what helps if the host has less."""
    text, free_bytes = f"{format_bytes(ways.host_bytes)} of host memory", ways.free_host_bytes
    if free_bytes is None or with_margin(ways.host_bytes) <= free_bytes:
        return text
    return f"{text}; {format_bytes(free_bytes)} is available: nvme_path= keeps optimizer state on disk"
