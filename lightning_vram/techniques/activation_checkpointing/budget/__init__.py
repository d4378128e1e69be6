"""Observe one step, then choose what to recompute so that activations fit a byte budget."""

from lightning_vram.techniques.activation_checkpointing.budget.apply import BudgetedCheckpointing, Decisions
from lightning_vram.techniques.activation_checkpointing.budget.shared import SharedPlan, share_largest

__all__ = ["BudgetedCheckpointing", "Decisions", "SharedPlan", "share_largest"]
