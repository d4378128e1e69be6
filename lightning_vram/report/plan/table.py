"""The table of configurations that a plan chose from."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_vram.planner.plan import MemoryPlan
from lightning_vram.report.plan.choices import Choice, cells, choices
from lightning_vram.report.plan.words import verdict
from lightning_vram.report.tables import Name, add_names, add_numbers, literal, plain_table

TIME = "Step times are modelled for this device, relative to the baseline."


def plan_table(plan: MemoryPlan) -> RenderableType:
    """Everything in a plan, but for its YAML. One line where the run fits without changes."""
    answer = Text(verdict(plan), style="bold green")
    if not plan.is_needed:
        return answer
    shown: list[RenderableType] = [answer, "", choices_table(choices(plan)), "", Text(f"* the plan. {TIME}")]
    if plan.best.layers:
        shown += ["", Text("Layers of the plan:"), Text(plan.best.layers)]
    return Group(*shown)


def choices_table(rows: Sequence[Choice]) -> Table:
    """Return a table for the terminal, or for a log."""
    headings, *lines = cells(rows)
    table = plain_table()
    add_numbers(table, *headings[:-1])
    add_names(table, headings[-1])
    for one, line in zip(rows, lines, strict=True):
        table.add_row(
            *map(literal, line[:-1]), Name(line[-1]), style="bold green" if one.is_plan else "" if one.fits else "dim"
        )
    return table
