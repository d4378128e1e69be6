"""What tables and pictures say of an estimate in the same words."""

from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.estimate.step import COLORS, CONTEXT_COLOR, Step, read_peak
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


def needed_line(estimate: MemoryEstimate) -> str:
    """What the process takes of the device."""
    name = "reserved and context" if estimate.context_bytes else "reserved"
    return f"{name} {format_bytes(estimate.needed_bytes)}"


def peak_sentence(estimate: MemoryEstimate) -> str:
    """When the peak is, and what makes it."""
    peak = read_peak(estimate.timeline)
    if peak is None:
        return f"No tensor was on {estimate.timeline.device}."
    where = f" in {module_name(peak.module)}" if peak.module else ""
    made = f"made by {operator_name(peak.op)}{where}"
    return f"The peak of tensors, {format_bytes(estimate.peak_bytes)}, is in the {label(peak.phase)}, {made}."


def peak_lines(estimate: MemoryEstimate, step: Step) -> tuple[str, ...]:
    """How high the peak is, which operator made it, and in which module."""
    column = step.columns[step.peak]
    lines = (f"peak of tensors {format_bytes(estimate.peak_bytes)}", operator_name(column.op))
    return (*lines, module_name(column.module)) if column.module else lines


def legend_rows(estimate: MemoryEstimate, step: Step) -> tuple[tuple[str, str, int], ...]:
    """Name, colour and bytes at the peak of each area, from the top."""
    rows = [(label(kind), COLORS[kind], estimate.by_category[kind]) for kind in reversed(step.categories)]
    context = [("context", CONTEXT_COLOR, estimate.context_bytes)]
    return tuple(rows + context if estimate.context_bytes else rows)
