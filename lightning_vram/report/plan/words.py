"""A plan as people see it: a table, a picture, a page."""

from lightning_vram.memory.units import format_bytes
from lightning_vram.planner.plan import MemoryPlan

TIMES = "step time relative to baseline (modelled)"
DOTS = "other configurations"
SLOWER = "slower than the axis"


def verdict(plan: MemoryPlan) -> str:
    """What a plan does, in one line."""
    sizes = f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)} on {plan.device.name}"
    if not plan.is_needed:
        return f"Fits without changes: {sizes}. There is nothing to do."
    return f"Fits with this plan: {sizes}, {ratio(plan.step_time_ratio)} the step time"


def ratio(step_time_ratio: float) -> str:
    """Step time relative to the baseline, as text."""
    return f"{step_time_ratio:.2f}x"
