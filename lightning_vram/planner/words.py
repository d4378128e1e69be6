"""Results of a search as sentences."""

from lightning_vram.memory.tracking.timeline import MemoryTimeline, Phase
from lightning_vram.memory.units import format_argument, format_bytes
from lightning_vram.planner.measured import Measured, with_margin
from lightning_vram.planner.miss import Ways
from lightning_vram.planner.parts import LEVELS, Exactness, Part
from lightning_vram.planner.remedies import OPTIMIZER_ON_HOST, WEIGHTS_ON_HOST


def ways_out(
    least: Measured, level: Exactness, ways: Ways, device_bytes: int | None = None, *, on_host: bool = False
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


def where(least: Measured) -> str:
    """Return the place of the peak, if known, after a comma."""
    return f", {least.peak}" if least.peak else ""


def peak_words(timeline: MemoryTimeline) -> str:
    """Return the place of the peak of a run: phase, and module with the largest share."""
    if timeline.peak_phase is None:
        return ""
    phase = {Phase.OPTIMIZER_STEP: "optimizer step"}.get(timeline.peak_phase, str(timeline.peak_phase))
    held = next(((name, size) for name, size in timeline.peak_by_module.items() if name), None)
    largest = "" if held is None else f", mostly for '{held[0]}' ({format_bytes(held[1])})"
    return f"in the {phase}{largest}"


def _code_of(strategy: Part) -> str:
    """Return a strategy as an argument of a Trainer, by its name if it has one."""
    if strategy in (OPTIMIZER_ON_HOST, WEIGHTS_ON_HOST):
        return "'fsdp_offload'" if strategy == WEIGHTS_ON_HOST else "'fsdp_offload_optimizer'"
    return f"{strategy.name}({', '.join(f'{name}={value!r}' for name, value in strategy.init_args.items())})"


def _on_host(ways: Ways) -> str:
    """Return the host memory of a strategy, and what helps if the host has less."""
    text, free_bytes = f"{format_bytes(ways.host_bytes)} of host memory", ways.free_host_bytes
    if free_bytes is None or with_margin(ways.host_bytes) <= free_bytes:
        return text
    return f"{text}; {format_bytes(free_bytes)} is available: nvme_path= keeps optimizer state on disk"
