"""Moments in fewer bytes where the parameters are.

May import: optimizers.on_host, optimizers.stepping, core, memory.
"""

from lightning_vram.optimizers.narrow.libraries import Library, why_not_installed
from lightning_vram.optimizers.narrow.moments import NarrowMoments

__all__ = ["Library", "NarrowMoments", "why_not_installed"]
