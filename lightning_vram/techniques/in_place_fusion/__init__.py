"""What cheap layers need not save: which of the ways works in a step, and proof from one observed step.

``policy.py`` directs; ``recomputation`` drops what can be made again, ``inplace_abn`` inverts, ``folding`` folds
frozen norms; ``links`` and ``storage_watch`` prove. May import: core, memory.
"""

from lightning_vram.techniques.in_place_fusion.policy import FrozenNormFolding, Fusion, FusionError, FusionPolicy

__all__ = ["FrozenNormFolding", "Fusion", "FusionError", "FusionPolicy"]
