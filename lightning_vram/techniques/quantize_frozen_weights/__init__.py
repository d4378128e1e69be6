"""Quantized (8- or 4-bit) weights of frozen layers, dequantized in each call. May import: core, memory."""

from lightning_vram.techniques.quantize_frozen_weights.apply import (
    QuantizedLayers,
    dequantize_frozen_weights,
    quantize_frozen_weights,
)
from lightning_vram.techniques.quantize_frozen_weights.packing import MIN_BLOCK_SIZE, Library
from lightning_vram.techniques.quantize_frozen_weights.quantized_weight import (
    QuantizedWeight,
    quantized_weight,
    read_weights_as,
)

__all__ = [
    "MIN_BLOCK_SIZE",
    "Library",
    "QuantizedLayers",
    "QuantizedWeight",
    "dequantize_frozen_weights",
    "quantize_frozen_weights",
    "quantized_weight",
    "read_weights_as",
]
