"""The rows of an estimate's tables: a name and what stands behind it."""

from lightning_vram.memory.estimate.result import TRAIN, MemoryEstimate
from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.tables import label


def categories(estimate: MemoryEstimate) -> tuple[tuple[Category, int], ...]:
    """Bytes at the peak of what is alive there."""
    return tuple((category, num_bytes) for category, num_bytes in estimate.by_category.items() if num_bytes)


def modules(estimate: MemoryEstimate, max_rows: int) -> tuple[tuple[str, int], ...]:
    """Bytes at the peak of the modules with the most, by their full names; then those of all others."""
    found = list(estimate.by_module.items())
    if len(found) <= max_rows:
        return tuple(found)
    rest = found[max_rows - 1 :]
    return (*found[: max_rows - 1], (f"{len(rest)} others", sum(num_bytes for _, num_bytes in rest)))


def moments(estimate: MemoryEstimate) -> tuple[tuple[str, int], ...]:
    """Most bytes of tensors in each phase of training, and in the other stages."""
    phases = [(label(phase), num_bytes) for phase, num_bytes in estimate.by_phase.items()]
    others = [(name, stage.timeline.peak_bytes) for name, stage in estimate.stages.items() if name != TRAIN]
    return (*phases, *others)


def process(estimate: MemoryEstimate) -> tuple[tuple[str, int], ...]:
    """From what tensors ask for to what the driver gives."""
    return (
        ("requested", estimate.peak_bytes),
        ("allocated", estimate.allocated_bytes),
        ("of it workspaces", estimate.workspace_bytes),
        ("reserved", estimate.reserved_bytes),
        ("reserved, expandable segments", estimate.expandable_reserved_bytes),
        ("context", estimate.context_bytes),
        ("reserved and context", estimate.needed_bytes),
    )


def facts(estimate: MemoryEstimate) -> tuple[tuple[str, str], ...]:
    """What else there is to say in a line each, as far as it is known."""
    found = [("batch", str(estimate.batch_size))]
    for name, size, refusal in (
        ("largest batch", estimate.max_batch_size, estimate.batch_size_refusal),
        ("longest sequence", estimate.max_sequence_length, estimate.sequence_length_refusal),
    ):
        if size is not None:
            found.append((name, f"{size} (limit: {'model' if refusal else 'memory'})"))
    if estimate.world_size > 1:
        found.append(("ranks", str(estimate.world_size)))
    if estimate.host_bytes:
        found.append(("host", format_bytes(estimate.host_bytes)))
    if estimate.pinned_bytes:
        found.append(("of it pinned", format_bytes(estimate.pinned_bytes)))
    return tuple(found)
