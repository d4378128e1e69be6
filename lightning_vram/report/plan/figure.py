"""The picture of a plan: what there is to choose from, by memory and time, under the budget."""

from typing import TYPE_CHECKING, Any

from lightning_vram.memory.units import format_bytes
from lightning_vram.planner.plan import MemoryPlan
from lightning_vram.report.numbered import write_list, write_numbers
from lightning_vram.report.pictures import BAD, FAINT, FONT, GOOD, INK, style_axes
from lightning_vram.report.plan.chart import Chart, read_chart
from lightning_vram.report.plan.words import DOTS, SLOWER, TIMES, verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE = (12.0, 6.0)  # inches
_FIGURE_LEFT = 0.07  # of the picture
_KEY, _KEY_WIDTH = (7.62, 0.2, 11.9, 5.1), 46  # inches, characters
_DOT = "#afb8c1"


def draw(plan: MemoryPlan) -> "Figure":
    """Draw a plan with matplotlib."""
    from matplotlib import rc_context  # an extra: not everybody has it
    from matplotlib.figure import Figure

    chart = read_chart(plan)
    with rc_context(FONT):
        figure = Figure(figsize=_SIZE, facecolor="white")
        axes = figure.add_axes((_FIGURE_LEFT, 0.11, 0.535, 0.71))
        _draw_axes(axes, chart)
        _draw_points(axes, plan, chart)
        write_numbers(axes, chart.entries, [chart.front, [(time, chart.budget) for time in chart.times]], chart.others)
        title = verdict(plan)
        size = min(17, 1180 / len(title))  # one line, whatever the device is called
        figure.text(_FIGURE_LEFT, 0.965, title, va="top", fontsize=size, fontweight="bold", color=GOOD)
        write_list(figure, chart.entries, _KEY, _KEY_WIDTH)
    return figure


def _draw_axes(axes: "Axes", chart: Chart) -> None:
    axes.set_xlim(chart.times)
    axes.set_ylim(chart.sizes)
    axes.set_xlabel(TIMES, color=FAINT)
    axes.set_ylabel(f"memory needed, {chart.unit}", color=INK)
    style_axes(axes)


def _draw_points(axes: "Axes", plan: MemoryPlan, chart: Chart) -> None:
    axes.axhspan(chart.budget, chart.sizes[1], color=BAD, alpha=0.06, linewidth=0, zorder=0)
    budget = f"budget {format_bytes(plan.budget_bytes)}"
    handles: list[Any] = [axes.axhline(chart.budget, color=BAD, linewidth=2, zorder=1, label=budget)]
    if chart.others:
        style: dict[str, Any] = {"color": _DOT, "markersize": 5, "zorder": 2, "label": DOTS}
        handles += axes.plot(*zip(*chart.others, strict=True), "o", **style)
    axes.plot(*zip(*chart.front, strict=True), color=FAINT, linewidth=1.5, zorder=3)
    slower: list[Any] = []
    for entry, is_slower in zip(chart.entries, chart.is_slower, strict=True):
        size = 12 if entry.is_bold else 9
        style = {"markersize": size, "markeredgecolor": "white", "zorder": 4, "clip_on": False, "label": SLOWER}
        drawn = axes.plot(*entry.spot, ">" if is_slower else "o", color=entry.color, **style)
        slower = drawn if is_slower else slower
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 3, "borderpad": 0}
    style = {"frameon": False, "fontsize": 10, "handletextpad": 0.5, "columnspacing": 1.4}
    axes.legend(handles=handles + slower, **style, **place)
