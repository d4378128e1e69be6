"""Meet a byte budget for activations in compiled code, whose compiler takes a share.

Each training step at the start of a run tries one share. May import: activation_checkpointing, core, memory.
"""

from lightning_vram.techniques.activation_checkpointing.compiled_budget.apply import CompiledBudget
from lightning_vram.techniques.activation_checkpointing.compiled_budget.search import CompiledBudgetError

__all__ = ["CompiledBudget", "CompiledBudgetError"]
