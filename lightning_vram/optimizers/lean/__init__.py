"""bf16 weights, with the remainder that training needs."""

from lightning_vram.optimizers.lean.checks import iterate_computing, refuse_lost_updates
from lightning_vram.optimizers.lean.parameters import SCHEMES, LeanAverage, LeanParameters

__all__ = ["SCHEMES", "LeanAverage", "LeanParameters", "iterate_computing", "refuse_lost_updates"]
