"""Messages of ``AutoVRAM``."""

from lightning_vram.memory.units import format_bytes
from lightning_vram.planner.plan import MemoryPlan
from lightning_vram.report.plan.choices import choices
from lightning_vram.report.plan.table import TIME, choices_table
from lightning_vram.report.tables import as_text

NAME = "AutoVRAM"


def found_message(plan: MemoryPlan) -> str:
    """Report the configuration taken, and the others tried."""
    best, device = plan.best, plan.device.name
    needed, budget = format_bytes(plan.found.plain.needed_bytes), format_bytes(plan.budget_bytes)
    if not plan.is_needed:
        return f"{NAME}: the run fits, nothing is changed. A step needs {needed} of the {budget} on {device}."
    return (
        f"{NAME}: a step needs {needed}, but the budget on {device} is {budget}. With {best.scheme} it needs "
        f"{format_bytes(best.needed_bytes)}, at about {plan.step_time_ratio:.2f} times the step time. Configurations "
        f"tried:\n{as_text(choices_table(choices(plan)))}\n* used for this run. {TIME}"
    )
