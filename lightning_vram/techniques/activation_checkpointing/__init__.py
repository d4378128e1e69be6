"""Recompute chosen layers in the backward; what a forward counts is counted once.

``apply.py`` swaps the classes of layers, ``recomputed_call.py`` is one call, ``two_runs.py`` compares its two runs,
``selective.py`` keeps chosen results. May import: core, memory.
"""

from lightning_vram.techniques.activation_checkpointing.apply import CheckpointingHandle, apply_activation_checkpointing
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy, parse_save

__all__ = ["CheckpointingHandle", "SavePolicy", "apply_activation_checkpointing", "parse_save"]
