"""See :class:`ActivationCompression`."""

from lightning_vram.callbacks.activation_compression.callback import ActivationCompression

__all__ = ["ActivationCompression"]
