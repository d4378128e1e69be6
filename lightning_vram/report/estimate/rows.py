"""The rows of an estimate's tables: a name and what stands behind it."""

import re

from lightning_vram.memory.estimate.result import TRAIN, MemoryEstimate
from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.tables import label


def category_rows(estimate: MemoryEstimate) -> tuple[tuple[Category, int], ...]:
    """Bytes at the peak of what is alive there."""
    return tuple((category, num_bytes) for category, num_bytes in estimate.by_category.items() if num_bytes)


def module_rows(estimate: MemoryEstimate, max_rows: int) -> tuple[tuple[str, int], ...]:
    """Bytes at the peak of the modules with the most, by their full names; then those of all others.

    Modules of the same size whose names differ in numbers only are one row, with their sum: ``"net.blocks.*.mlp x8"``.
    """
    alike: dict[tuple[str, int], list[str]] = {}
    for name, num_bytes in estimate.by_module.items():
        alike.setdefault((re.sub(r"(?<![^.])\d+(?![^.])", "*", name), num_bytes), []).append(name)
    found = [
        (names[0] if len(names) == 1 else f"{pattern} x{len(names)}", num_bytes * len(names), len(names))
        for (pattern, num_bytes), names in alike.items()
    ]
    found.sort(key=lambda row: -row[1])
    if len(found) > max_rows:
        rest = found[max_rows - 1 :]
        num_rest = sum(num_modules for *_, num_modules in rest)
        found = [*found[: max_rows - 1], (f"{num_rest} others", sum(num_bytes for _, num_bytes, _ in rest), num_rest)]
    return tuple((name, num_bytes) for name, num_bytes, _ in found)


def moment_rows(estimate: MemoryEstimate) -> tuple[tuple[str, int], ...]:
    """Most bytes of tensors in each phase of training, and in the other stages."""
    phases = [(label(phase), num_bytes) for phase, num_bytes in estimate.by_phase.items()]
    others = [(name, stage.timeline.peak_bytes) for name, stage in estimate.stages.items() if name != TRAIN]
    return (*phases, *others)


def process_rows(estimate: MemoryEstimate) -> tuple[tuple[str, int], ...]:
    """From what tensors ask for to what the driver gives, as far as these differ: on the host they do not."""
    if estimate.needed_bytes == estimate.peak_bytes:
        return (("requested", estimate.peak_bytes),)
    rows = [
        ("requested", estimate.peak_bytes),
        ("allocated", estimate.allocated_bytes),
        ("of it workspaces", estimate.workspace_bytes),
        ("reserved", estimate.reserved_bytes),
        ("reserved, expandable segments", estimate.expandable_reserved_bytes),
    ]
    if estimate.context_bytes:
        rows += [("context", estimate.context_bytes), ("reserved and context", estimate.needed_bytes)]
    return tuple((name, num_bytes) for name, num_bytes in rows if num_bytes)


def fact_rows(estimate: MemoryEstimate) -> tuple[tuple[str, str], ...]:
    """Further facts about the run that are known, a line each."""
    found = [("batch", f"{estimate.batch_size} samples")] if estimate.batch_size else []
    for name, size, unit, refusal in (
        ("largest batch that fits", estimate.max_batch_size, "samples", estimate.batch_size_refusal),
        ("longest sequence", estimate.max_sequence_length, "tokens", estimate.sequence_length_refusal),
    ):
        if size is not None:
            found.append((name, f"{size} {unit}{' (limit: model)' if refusal else ''}"))
    if estimate.world_size > 1:
        found.append(("ranks", str(estimate.world_size)))
    if estimate.host_bytes:
        found.append(("host memory", format_bytes(estimate.host_bytes)))
    if estimate.pinned_bytes:
        found.append(("of it pinned", format_bytes(estimate.pinned_bytes)))
    return tuple(found)
