"""Which features make a run fit, at the least cost."""

from lightning_vram.planner.plan import MemoryPlan, PlanError, plan_memory

__all__ = ["MemoryPlan", "PlanError", "plan_memory"]
