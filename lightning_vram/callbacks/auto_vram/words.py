"""What ``AutoVRAM`` says."""

from collections.abc import Sequence

from lightning_vram.memory.units import format_bytes
from lightning_vram.planner.measured import Found
from lightning_vram.planner.miss import Ways
from lightning_vram.planner.parts import Exactness
from lightning_vram.planner.plan import MemoryPlan
from lightning_vram.planner.words import ways_out, where
from lightning_vram.report.plan.choices import choices
from lightning_vram.report.plan.table import TIME, choices_table
from lightning_vram.report.tables import as_text

NAME = "AutoVRAM"


def found_message(plan: MemoryPlan) -> str:
    """Say what is done, and what else was tried."""
    best, device = plan.best, plan.device.name
    needed, budget = format_bytes(plan.found.plain.needed_bytes), format_bytes(plan.budget_bytes)
    if not plan.is_needed:
        return f"{NAME}: the run fits, nothing is changed. A step needs {needed} of the {budget} on {device}."
    return (
        f"{NAME}: a step needs {needed}, but the budget on {device} is {budget}. With {best.scheme} it needs "
        f"{format_bytes(best.needed_bytes)}, at about {plan.step_time_ratio:.2f} times the step time. Configurations "
        f"tried:\n{as_text(choices_table(choices(plan)))}\n* used for this run. {TIME}"
    )


def largest_line(num_batches: int, shape: Sequence[int]) -> str:
    """Say what a run is planned for whose batches differ."""
    return f"Planned for the largest of the first {num_batches} batches, {list(shape)}."


def larger_line(shape: Sequence[int]) -> str:
    """Say that there is a larger one."""
    return (
        f"{NAME}: a batch of shape {list(shape)} is larger than the batch the run was planned for. It may need more "
        "memory."
    )


def miss_message(found: Found, budget_bytes: int, device: str, level: Exactness, ways: Ways, *, goes_on: bool) -> str:
    """Say that nothing fits, and what would help."""
    least, helps = found.least, ways_out(found.least, level, ways, budget_bytes if goes_on else None)
    fate = " The run continues with it, and will probably run out of memory." if goes_on else ""
    return (
        f"{NAME}: no configuration fits {format_bytes(budget_bytes)} on {device}. The minimum found is "
        f"{format_bytes(least.needed_bytes)}, with {least.scheme}{where(least)}.{fate} {helps}"
    )


def unknown_line(reason: str, *, can_run_again: bool) -> str:
    """Say that there is no plan, and that nothing is changed."""
    later = "; if a step runs out of memory, layers are checkpointed" if can_run_again else ""
    return f"{NAME} cannot plan this run: {reason}. The run starts unchanged{later}."


def fallback_lines(reason: str, done: Sequence[str]) -> str:
    """Say that there is no plan, and what is done instead."""
    return f"{NAME} cannot plan this run: {reason}.\nThe run continues without a plan: {', '.join(done)}."


def weights_message(reason: str, weights_bytes: int, budget_bytes: int) -> str:
    """Say that not even the weights fit."""
    return (
        f"{NAME}: the weights alone need {format_bytes(weights_bytes)}, more than the budget of "
        f"{format_bytes(budget_bytes)}. Give a larger budget, or use strategy='fsdp_offload'. The step could not be "
        f"traced: {reason}."
    )


def correction_line(seconds: float, reserved_bytes: int, budget_bytes: int, scheme: object | None) -> str:
    """Say what the first steps took, and what changes."""
    end = "The plan is kept." if scheme is None else f"The run continues with {scheme}."
    return (
        f"{NAME}: a step takes {seconds * 1e3:.1f} ms and reserves {format_bytes(reserved_bytes)} of the "
        f"{format_bytes(budget_bytes)}. {end}"
    )


def tighter_line(scheme: object) -> str:
    """Say that the plan was not enough."""
    return f"{NAME}: a step ran out of memory in spite of the plan. It is repeated with {scheme}."


def relief_note(level: Exactness) -> str:
    """For an error that no plan helps against."""
    if level == Exactness.EXACT:
        return f"{NAME}: no tighter plan is left. allow='lossless' would split the batch into micro-batches."
    return f"{NAME}: no tighter plan is left."
