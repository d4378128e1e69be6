"""See :class:`LowBitOptimizer`."""

from lightning_vram.callbacks.low_bit_optimizer.callback import LowBitOptimizer

__all__ = ["LowBitOptimizer"]
