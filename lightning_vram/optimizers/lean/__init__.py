"""Weights in 16 bits, with what they lack beside them. May import: optimizers.stepping, techniques, core, memory."""

from lightning_vram.optimizers.lean.checks import iterate_computing, refuse_lost_updates
from lightning_vram.optimizers.lean.parameters import SCHEMES, LeanAverage, LeanParameters

__all__ = ["SCHEMES", "LeanAverage", "LeanParameters", "iterate_computing", "refuse_lost_updates"]
