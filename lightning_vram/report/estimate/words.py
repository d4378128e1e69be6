"""What tables and pictures of an estimate have in common, as text."""

from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.estimate.step import COLORS, Step, read_peak
from lightning_vram.report.scale import NO_LIMIT, Scale, choose_scale
from lightning_vram.report.tables import label


def verdict(estimate: MemoryEstimate) -> str:
    """Whether it fits, in one line."""
    device = estimate.device
    sizes = f"{format_bytes(estimate.needed_bytes)} of {format_bytes(device.memory_bytes)} on {device.name}"
    if estimate.fits:
        return f"Fits: {sizes}"
    return f"Does not fit: {sizes}, {format_bytes(estimate.needed_bytes - device.memory_bytes)} too much"


def module_name(fqn: str, max_length: int = 40) -> str:
    """A module's name, the end of a long one, or words for what the root or none made."""
    return (fqn if len(fqn) <= max_length else "..." + fqn[3 - max_length :]) or "(no module)"


def operator_name(op: str) -> str:
    """An operator as people know it: ``"aten.mm.default"`` -> ``"aten.mm"``."""
    return op.removesuffix(".default")


def step_scale(estimate: MemoryEstimate) -> Scale:
    """The axis of a training step, which shows what the allocator has: the context is outside of it."""
    needed_bytes = max(estimate.reserved_bytes, estimate.peak_bytes)
    return choose_scale(needed_bytes, limit_bytes(estimate), headroom=1.2)  # three rows of words


def limit_bytes(estimate: MemoryEstimate) -> int:
    """What the device has for the allocator."""
    return max(0, estimate.device.memory_bytes - estimate.context_bytes)


def limit_line(estimate: MemoryEstimate) -> str:
    """What the device has for the allocator, as text; empty if there is no limit."""
    if estimate.device.memory_bytes >= NO_LIMIT:
        return ""
    name = f"{estimate.device.name} minus context" if estimate.context_bytes else estimate.device.name
    return f"{name} {format_bytes(limit_bytes(estimate))}"


def reserved_line(estimate: MemoryEstimate) -> str:
    """What the allocator takes, as text; empty if that is the peak of tensors, as where there is no allocator."""
    is_more = estimate.reserved_bytes > estimate.peak_bytes
    return f"reserved {format_bytes(estimate.reserved_bytes)}" if is_more else ""


def step_words(step: Step) -> str:
    """What the axis of time counts."""
    return f"one training step: {step.num_events:,} allocations and frees"


def peak_line(estimate: MemoryEstimate) -> str:
    """How high the peak is."""
    return f"peak of tensors {format_bytes(estimate.peak_bytes)}"


def peak_sentence(estimate: MemoryEstimate) -> str:
    """When the peak is, and what makes it."""
    peak = read_peak(estimate.timeline)
    if peak is None:
        return f"No tensor was on {estimate.timeline.device}."
    where = f" in {module_name(peak.module)}" if peak.module else ""
    made = f"made by {operator_name(peak.op)}{where}"
    return f"The peak of tensors, {format_bytes(estimate.peak_bytes)}, is in the {label(peak.phase)}, {made}."


def legend_rows(estimate: MemoryEstimate, step: Step) -> tuple[tuple[str, str, int], ...]:
    """Name, colour and bytes at the peak of each area, from the top."""
    return tuple((label(kind), COLORS[kind], estimate.by_category[kind]) for kind in reversed(step.categories))
