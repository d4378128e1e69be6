"""Sizes, such as the biggest batch: a panel for each workload, a bar for each way to train."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from lightning_vram.memory.units import format_bytes
from lightning_vram.report.tables import wrap_name
from tests.benchmarks.report.bars import OOM, PEAK, BarPanel
from tests.benchmarks.report.figures import BAD, FAINT, FONT, INK
from tests.benchmarks.report.scatter import COLORS, WORDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _ROW = 12.0, 0.42  # inches; of the picture, of a bar
_LEFT, _RIGHT, _ABOVE, _BELOW, _CAPTION = 4.3, 0.3, 0.75, 0.25, 0.35  # inches
_ROOM = 1.22  # of the longest bar, for the number at its end
_NAME_WIDTH = 44  # characters


def draw_bars(panels: Sequence[BarPanel], caption: str) -> "Figure":
    """Draw panels below each other.

    Args:
        panels: At least one.
        caption: Device, versions and date.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    from matplotlib import rc_context  # an extra: not everybody has it
    from matplotlib.figure import Figure

    heights = [_ABOVE + _BELOW + _ROW * len(panel.bars) for panel in panels]
    total = sum(heights) + _CAPTION
    with rc_context(FONT):
        figure = Figure(figsize=(_WIDTH, total), facecolor="white")
        top = total
        for panel, height in zip(panels, heights, strict=True):
            size = ((_WIDTH - _LEFT - _RIGHT) / _WIDTH, (height - _ABOVE - _BELOW) / total)
            axes = figure.add_axes((_LEFT / _WIDTH, (top - height + _BELOW) / total, *size))
            _draw_panel(axes, panel)
            figure.text(0.2 / _WIDTH, (top - 0.25) / total, _title(panel), va="top", color=INK, fontweight="bold")
            top -= height
        figure.text(0.2 / _WIDTH, 0.12 / total, caption, va="bottom", fontsize=10, color=FAINT)
    return figure


def _title(panel: BarPanel) -> str:
    if panel.what == PEAK:
        return f"Peak of the step: {panel.workload}"
    budget = "" if panel.budget_bytes is None else f" within {format_bytes(panel.budget_bytes)}"
    size = f"Most {panel.what}" if panel.what.partition(" ")[0].endswith("s") else f"Largest {panel.what}"
    return f"{size}{budget}: {panel.workload}"


def _draw_panel(axes: "Axes", panel: BarPanel) -> None:
    longest = max(bar.largest or 0 for bar in panel.bars) or 1
    rows = range(len(panel.bars))
    for kind in dict.fromkeys(bar.kind for bar in panel.bars):
        shown = [row for row in rows if panel.bars[row].kind == kind]
        axes.barh(shown, [panel.bars[row].largest or 0 for row in shown], 0.66, color=COLORS[kind], label=WORDS[kind])
    for row, bar in enumerate(panel.bars):
        color, weight = (BAD, "bold") if bar.text == OOM else (INK if bar.largest else FAINT, "normal")
        place = (bar.largest or 0) + 0.012 * longest
        axes.text(place, row, bar.text, va="center", color=color, fontweight=weight, fontsize=11)
    axes.set_yticks(rows, ["\n".join(wrap_name(bar.name, _NAME_WIDTH)) for bar in panel.bars], fontsize=11)
    for text, bar in zip(axes.get_yticklabels(), panel.bars, strict=True):
        text.set_color(COLORS[bar.kind])
    axes.set_ylim(len(panel.bars) - 0.5, -0.5)
    axes.set_xlim(0, _ROOM * longest)
    axes.set_xticks([])
    axes.tick_params(length=0)
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color(FAINT)
