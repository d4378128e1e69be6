"""Moments in fewer bytes where the parameters are.

May import: optimizers.on_host, optimizers.stepping, core, memory.
"""

from lightning_vram.optimizers.narrow.moments import NarrowMoments

__all__ = ["NarrowMoments"]
