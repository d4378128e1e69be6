"""Drop what a recipe of cheap operators can make again.

``stage.py`` is a stage of the saved-tensor pipeline and decides, ``recorder.py`` notes how tensors were made,
``rebuilding.py`` makes them again. May import: core, memory.
"""

from lightning_vram.techniques.in_place_fusion.recomputation.compiled import apply_compiled_recomputation
from lightning_vram.techniques.in_place_fusion.recomputation.stage import Recomputation

__all__ = ["Recomputation", "apply_compiled_recomputation"]
