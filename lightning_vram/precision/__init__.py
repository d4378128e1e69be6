"""In which precision it computes: the mixed-precision plugin, and what only it needs."""

from lightning_vram.precision.plugin import LeanMixedPrecision

__all__ = ["LeanMixedPrecision"]
