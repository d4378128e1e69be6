"""The picture of a step that was tracked, as of one that was estimated."""

from pathlib import Path

from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.estimate.result import TRAIN, MemoryEstimate, StageEstimate
from lightning_vram.memory.tracking.timeline import MemoryTimeline
from lightning_vram.report.estimate.html import page


def write_step(timeline: MemoryTimeline, limit_bytes: int, path: Path) -> None:
    """Write a page with the live bytes of a step, stacked, under a limit.

    Args:
        timeline: Of one batch.
        limit_bytes: What there was.
        path: File to write.
    """
    peak_bytes = timeline.peak_bytes
    stage = StageEstimate(timeline, peak_bytes, peak_bytes, peak_bytes)
    device = DeviceSpec(timeline.device, limit_bytes)
    path.write_text(page(MemoryEstimate(device, {TRAIN: stage}, batch_size=0)), encoding="utf-8")
