"""Watch one step, then choose what to recompute so that the rest fits a number of bytes.

``observer.py`` watches, ``rounds.py`` is what was seen, ``plan.py`` plain data, ``peak.py`` its bytes, ``program.py``
and ``solver.py`` choose, ``apply.py`` does it, ``table.py`` tells it. May import: activation_checkpointing, core,
memory.
"""

from lightning_vram.techniques.activation_checkpointing.budget.apply import BudgetedCheckpointing, Decisions
from lightning_vram.techniques.activation_checkpointing.budget.shared import SharedPlan, share_largest

__all__ = ["BudgetedCheckpointing", "Decisions", "SharedPlan", "share_largest"]
