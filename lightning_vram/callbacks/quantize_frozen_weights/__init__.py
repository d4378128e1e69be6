"""See :class:`QuantizeFrozenWeights`."""

from lightning_vram.callbacks.quantize_frozen_weights.callback import QuantizeFrozenWeights

__all__ = ["QuantizeFrozenWeights"]
