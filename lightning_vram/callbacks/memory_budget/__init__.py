"""See :class:`MemoryBudget`."""

from lightning_vram.callbacks.memory_budget.callback import MemoryBudget

__all__ = ["MemoryBudget"]
