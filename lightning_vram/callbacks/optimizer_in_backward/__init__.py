"""See :class:`OptimizerInBackward`."""

from lightning_vram.callbacks.optimizer_in_backward.callback import OptimizerInBackward

__all__ = ["OptimizerInBackward"]
