"""Peak against step time: a panel for each workload, a point for each way to train, names for the Pareto front."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lightning_vram.memory.units import format_bytes
from lightning_vram.report.drawing import unit_of
from lightning_vram.report.tables import format_seconds
from tests.benchmarks.report.figures import (
    FAINT,
    FONT,
    INK,
    Entry,
    list_height,
    stairs,
    style_axes,
    write_list,
    write_numbers,
)
from tests.benchmarks.report.points import PEER, Panel, front
from tests.benchmarks.report.results import BASELINE, OURS, PLAIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours of Okabe and Ito, which people who see fewer colours can tell apart as well, and marks for all.
COLORS = {PLAIN: INK, OURS: "#0072b2", PEER: "#b34700"}
WORDS = {PLAIN: BASELINE, OURS: "lightning_vram", PEER: "others"}
_MARKS = {PLAIN: "D", OURS: "o", PEER: "s"}
_WIDTH, _HEIGHT = 12.0, 5.6  # inches, of a panel
_LEFT, _ABOVE, _BELOW, _CAPTION = 0.85, 0.95, 0.75, 0.35  # inches
_LIST, _LIST_WIDTH = 7.95, 46  # inches from the left, characters
_MARGIN, _HEADROOM = 0.16, 1.12


def draw_scatter(panels: Sequence[Panel], caption: str) -> "Figure":
    """Draw panels below each other. The Pareto front has numbers, and a list of names to its right.

    Args:
        panels: At least one.
        caption: Device, versions and date.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    from matplotlib import rc_context  # an extra: not everybody has it
    from matplotlib.figure import Figure

    lists = [_entries(panel) for panel in panels]
    heights = [max(_HEIGHT, _ABOVE + _BELOW + list_height(entries, _LIST_WIDTH)) for entries in lists]
    total = sum(heights) + _CAPTION
    with rc_context(FONT):
        figure, bottom = Figure(figsize=(_WIDTH, total), facecolor="white"), total
        for panel, entries, height in zip(panels, lists, heights, strict=True):
            bottom -= height
            size = ((_LIST - 0.35 - _LEFT) / _WIDTH, (height - _ABOVE - _BELOW) / total)
            axes = figure.add_axes((_LEFT / _WIDTH, (bottom + _BELOW) / total, *size))
            _draw_panel(axes, panel, entries)
            top = bottom + height - _ABOVE
            write_list(figure, entries, (_LIST, bottom, _WIDTH, top), _LIST_WIDTH)
        figure.text(_LEFT / _WIDTH, 0.12 / total, caption, va="bottom", fontsize=10, color=FAINT)
    return figure


def _entries(panel: Panel) -> list[Entry]:
    """The Pareto front of a panel, from the fastest to the smallest."""
    unit_bytes, _ = _unit(panel)
    entries = []
    for point in front(panel.points):
        time = format_seconds(point.time) if panel.first is None else f"{point.time:.2f}x"
        details = f"{format_bytes(point.peak_bytes)}, {time}"
        entries.append(Entry((point.time, point.peak_bytes / unit_bytes), point.name, details, COLORS[point.kind]))
    return entries


def _unit(panel: Panel) -> tuple[int, str]:
    return unit_of(max(point.peak_bytes for point in panel.points))


def _draw_panel(axes: "Axes", panel: Panel, entries: Sequence[Entry]) -> None:
    unit_bytes, unit = _unit(panel)
    _draw_axes(axes, panel, unit_bytes)
    peak = "tracked peak of the step" if panel.is_tracked else "max_memory_allocated of the step"
    axes.set_ylabel(f"{peak}, {unit}", color=INK)
    axes.set_xlabel(_time_words(panel), color=INK)
    axes.set_title(panel.workload, loc="left", color=INK, fontweight="bold", pad=28)
    corners = stairs([entry.spot for entry in entries])
    name = "Pareto front: nothing is smaller and faster"
    axes.plot(*zip(*corners, strict=True), color=FAINT, linewidth=1.6, zorder=2, label=name)
    for kind in (PEER, OURS, PLAIN):
        points = [point for point in panel.points if point.kind == kind]
        if not points:
            continue
        times, sizes = [point.time for point in points], [point.peak_bytes / unit_bytes for point in points]
        lows, highs = [point.low for point in points], [point.high for point in points]
        axes.hlines(sizes, lows, highs, color=COLORS[kind], linewidth=1, alpha=0.45)
        style: dict[str, Any] = {"color": COLORS[kind], "markersize": 9, "markeredgecolor": "white", "linestyle": ""}
        axes.plot(times, sizes, _MARKS[kind], label=WORDS[kind], zorder=4, **style)
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "ncols": 4, "borderaxespad": 0.2}
    axes.legend(frameon=False, fontsize=10, handletextpad=0.4, columnspacing=1.2, borderpad=0, **place)
    write_numbers(axes, entries, [corners], [(point.time, point.peak_bytes / unit_bytes) for point in panel.points])


def _draw_axes(axes: "Axes", panel: Panel, unit_bytes: int) -> None:
    ends = [point.low for point in panel.points] + [point.high for point in panel.points]
    width = max(max(ends) - min(ends), 0.1 * max(ends))
    axes.set_xlim(max(min(ends) - _MARGIN * width, 0), max(ends) + _MARGIN * width)
    axes.set_ylim(0, _HEADROOM * max(point.peak_bytes for point in panel.points) / unit_bytes)
    style_axes(axes)


def _time_words(panel: Panel) -> str:
    if panel.first is None:
        return "step time, seconds"
    known = f" ({format_seconds(panel.first_seconds)})" if panel.first_seconds is not None else ""
    return f"step time relative to {panel.first}{known}"
