"""What cheap layers need not save: which of the ways works in a step, and proof from one observed step.

``policy.py`` directs; ``recomputation`` drops what can be made again, ``inplace_abn`` inverts, ``folding`` folds
frozen norms; ``links`` and ``storage_watch`` prove. May import: core, memory.
"""
