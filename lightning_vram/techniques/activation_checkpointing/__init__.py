"""Recompute chosen layers in the backward; what a forward counts is counted once.

``apply.py`` swaps the classes of layers, ``recomputed_call.py`` is one call, ``two_runs.py`` compares its two runs,
``selective.py`` keeps chosen results. May import: core, memory.
"""
