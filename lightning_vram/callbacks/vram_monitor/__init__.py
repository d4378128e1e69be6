"""See :class:`VRAMMonitor`."""

from lightning_vram.callbacks.vram_monitor.callback import VRAMMonitor

__all__ = ["VRAMMonitor"]
