"""Recompute chosen layers in the backward, or as much of them as a byte budget asks for. May import: core, memory."""

from lightning_vram.techniques.activation_checkpointing.apply import (
    BudgetedCheckpointing,
    CheckpointingHandle,
    apply_activation_checkpointing,
    share_largest,
)
from lightning_vram.techniques.activation_checkpointing.budget_plan import CheckpointPlan
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy, parse_save

__all__ = [
    "BudgetedCheckpointing",
    "CheckpointPlan",
    "CheckpointingHandle",
    "SavePolicy",
    "apply_activation_checkpointing",
    "parse_save",
    "share_largest",
]
