"""Save less for backward around cheap layers: recompute, invert, fold, or write in place. May import: core, memory."""

from lightning_vram.techniques.in_place_fusion.policy import Fusion, FusionError, FusionPolicy

__all__ = ["Fusion", "FusionError", "FusionPolicy"]
