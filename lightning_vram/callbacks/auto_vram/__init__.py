"""See :class:`AutoVRAM`."""

from lightning_vram.callbacks.auto_vram.callback import AutoVRAM

__all__ = ["AutoVRAM"]
