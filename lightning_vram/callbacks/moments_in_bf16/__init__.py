"""See :class:`MomentsInBF16`."""

from lightning_vram.callbacks.moments_in_bf16.callback import MomentsInBF16

__all__ = ["MomentsInBF16"]
