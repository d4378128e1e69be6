"""The one pipeline for saved tensors, and ways to step aside where hooks may not act.

``SavedTensorStage`` is what recomputation, compression and offloading derive from: the innermost hooks win, so the
three are stages of one pipeline. May import: core.tensors and its neighbours, memory.
"""
