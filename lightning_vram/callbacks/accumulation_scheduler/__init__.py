"""See :class:`AccumulationScheduler`."""

from lightning_vram.callbacks.accumulation_scheduler.callback import AccumulationScheduler

__all__ = ["AccumulationScheduler"]
