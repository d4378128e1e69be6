"""See :class:`ActivationCompression`."""

from lightning_vram.callbacks.activation_compression.callback import ActivationCompression as ActivationCompression
