"""Drop saved activations that cheap operators can recompute. May import: core, memory."""

from lightning_vram.techniques.in_place_fusion.recomputation.compiled import apply_compiled_recomputation
from lightning_vram.techniques.in_place_fusion.recomputation.stage import Recomputation

__all__ = ["Recomputation", "apply_compiled_recomputation"]
