"""The picture of a step that was tracked, as of one that was estimated."""

from dataclasses import replace
from pathlib import Path

from lightning_vram.memory.tracking.timeline import MemoryTimeline
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.before_after import as_estimate
from lightning_vram.report.estimate.html import page


def write_step(timeline: MemoryTimeline, budget_bytes: int | None, batch_size: int, path: Path) -> None:
    """Write a page with the live bytes of a step, stacked, under its budget. A ``batch_size`` of 0 is unknown."""
    estimate = replace(as_estimate(timeline, budget_bytes, "budget"), batch_size=batch_size)
    title = f"Peak of the training step: {format_bytes(timeline.peak_bytes)}"
    if budget_bytes is not None:
        title += f", {'within' if estimate.fits else 'above'} the budget of {format_bytes(budget_bytes)}"
    path.write_text(page(estimate, title), encoding="utf-8")
