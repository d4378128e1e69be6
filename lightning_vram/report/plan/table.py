"""The table of a plan: the run as it is, the plan, and what else there is to choose from."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_vram.memory.units import format_bytes
from lightning_vram.planner.plan import MemoryPlan
from lightning_vram.report.plan.choices import Choice, choices
from lightning_vram.report.plan.words import ratio, verdict
from lightning_vram.report.tables import literal

_TIME = "Step times are modelled for this device, relative to the current configuration."


def plan_table(plan: MemoryPlan) -> RenderableType:
    """Everything a plan says, but for its YAML. One line where the run fits as it is."""
    answer = Text(verdict(plan), style="bold green")
    if not plan.is_needed:
        return answer
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("", justify="right")
    table.add_column("features")
    for name in ("memory", "of budget", "step time"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("results", no_wrap=True)
    for number, one in enumerate(choices(plan), start=1):
        name = f"the plan: {one.name}" if one.is_plan else one.name
        cells = (format_bytes(one.needed_bytes), f"{one.share:.1%}", ratio(one.step_time_ratio), one.results)
        table.add_row(str(number), literal(name), *cells, style=_style(one))
    shown: list[RenderableType] = [answer, "", table, "", Text(_TIME)]
    if plan.best.layers:
        shown += ["", Text("Layers of the plan:"), Text(plan.best.layers)]
    return Group(*shown)


def _style(one: Choice) -> str:
    if one.is_plan:
        return "bold green"
    return "" if one.fits else "dim"
