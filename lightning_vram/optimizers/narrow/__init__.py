"""Low-precision moments on the device of the parameters."""

from lightning_vram.optimizers.narrow.libraries import Library, why_not_installed
from lightning_vram.optimizers.narrow.moments import NarrowMoments

__all__ = ["Library", "NarrowMoments", "why_not_installed"]
