"""See :class:`InPlaceFusion`."""

from lightning_vram.callbacks.in_place_fusion.callback import InPlaceFusion

__all__ = ["InPlaceFusion"]
