"""See :class:`LeakDetector`."""

from lightning_vram.callbacks.leak_detector.callback import LeakDetector

__all__ = ["LeakDetector"]
