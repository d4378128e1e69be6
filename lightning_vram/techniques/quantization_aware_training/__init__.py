"""Layers that compute with rounded weights and inputs, in training and from a file. May import: core, memory."""

from lightning_vram.techniques.quantization_aware_training.apply import (
    FakeQuantization,
    Scheme,
    apply_fake_quantization,
)
from lightning_vram.techniques.quantization_aware_training.files import load_quantized, save_quantized

__all__ = ["FakeQuantization", "Scheme", "apply_fake_quantization", "load_quantized", "save_quantized"]
