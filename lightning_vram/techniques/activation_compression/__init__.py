"""Saved tensors in fewer bytes, as a stage of the saved-tensor pipeline. May import: core, memory."""

from lightning_vram.techniques.activation_compression.stage import CompressionStage, gradient_cosine

__all__ = ["CompressionStage", "gradient_cosine"]
