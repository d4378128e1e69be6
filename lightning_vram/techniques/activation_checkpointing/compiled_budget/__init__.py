"""Meet a budget in bytes for compiled layers, whose compiler takes a share.

``search.py`` chooses the next share to try, ``kept_bytes.py`` measures what a step keeps, ``apply.py`` does both, step
by step. May import: activation_checkpointing, core, memory.
"""

from lightning_vram.techniques.activation_checkpointing.compiled_budget.apply import CompiledBudget
from lightning_vram.techniques.activation_checkpointing.compiled_budget.search import CompiledBudgetError

__all__ = ["CompiledBudget", "CompiledBudgetError"]
