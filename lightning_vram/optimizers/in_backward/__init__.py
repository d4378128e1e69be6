"""Step each parameter in the backward, as soon as its gradient is complete."""

from lightning_vram.optimizers.in_backward.one_step import Clipping
from lightning_vram.optimizers.in_backward.steps import BackwardSteps

__all__ = ["BackwardSteps", "Clipping"]
