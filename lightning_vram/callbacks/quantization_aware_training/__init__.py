"""See :class:`QuantizationAwareTraining` and :func:`quantize_after_fit`."""

from lightning_vram.callbacks.quantization_aware_training.callback import (
    QuantizationAwareTraining,
    QuantizedMetrics,
    quantize_after_fit,
)

__all__ = ["QuantizationAwareTraining", "QuantizedMetrics", "quantize_after_fit"]
