"""Tell before a run whether it fits the device's memory."""

from lightning_vram.callbacks.memory_budget.callback import MemoryBudget as MemoryBudget
