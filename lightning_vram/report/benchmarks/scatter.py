"""Peak against step time: a panel for each workload, a point for each way to train."""

from collections.abc import Collection, Sequence
from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from lightning_vram.report.benchmarks.labels import Name, list_height, list_names, place_names
from lightning_vram.report.benchmarks.points import PEER, Panel, Point, front
from lightning_vram.report.benchmarks.results import BASELINE, OURS, PLAIN
from lightning_vram.report.estimate.scale import unit_of
from lightning_vram.report.pictures import FAINT, FONT, GRID, INK
from lightning_vram.report.tables import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours of Okabe and Ito, which people who see fewer colours can tell apart as well, and marks for all.
COLORS = {PLAIN: INK, OURS: "#0072b2", PEER: "#b34700"}
WORDS = {PLAIN: BASELINE, OURS: "lightning_vram", PEER: "others"}
_MARKS = {PLAIN: "D", OURS: "o", PEER: "s"}
_WIDTH, _HEIGHT = 12.0, 6.0  # inches, of a panel
_LEFT, _RIGHT, _ABOVE, _BELOW, _CAPTION, _LIST = 0.85, 0.25, 0.95, 1.15, 0.35, 4.4  # inches
_NOTE_LINE = 0.19  # inches; _BELOW has room for two
_MARGIN, _HEADROOM = 0.16, 1.12
_NAME_WIDTH, _NOTE_WIDTH = 30, 125  # characters
_SIZE = 11.0


def draw_scatter(panels: Sequence[Panel], caption: str) -> "Figure":
    """Draw panels below each other. No name covers another: where points are too close, names stand in a list.

    Args:
        panels: At least one.
        caption: Device, versions and date.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    from matplotlib import rc_context  # an extra: not everybody has it
    from matplotlib.figure import Figure

    below = [_BELOW + _NOTE_LINE * max(0, _note(panel).count("\n") - 1) for panel in panels]
    rooms = [max(_HEIGHT - _BELOW, _ABOVE + list_height(len(panel.points), _SIZE)) for panel in panels]
    heights = [room + foot for room, foot in zip(rooms, below, strict=True)]
    total = sum(heights) + _CAPTION
    with rc_context(FONT):
        figure, bottom = Figure(figsize=(_WIDTH, total), facecolor="white"), total
        for panel, height, foot in zip(panels, heights, below, strict=True):
            bottom -= height
            place = (_LEFT, bottom + foot, _WIDTH - _LEFT - _RIGHT, height - _ABOVE - foot)
            axes = _add_axes(figure, place)
            if not draw_panel(axes, panel):
                axes.remove()
                axes = _add_axes(figure, (*place[:2], place[2] - _LIST, place[3]))
                draw_panel(axes, panel, is_listed=True)
            note: dict[str, Any] = {"va": "bottom", "fontsize": 10, "color": FAINT}
            figure.text(_LEFT / _WIDTH, (bottom + 0.12) / total, _note(panel), **note)
        figure.text(_LEFT / _WIDTH, 0.12 / total, caption, va="bottom", fontsize=10, color=FAINT)
    return figure


def _add_axes(figure: "Figure", place: tuple[float, float, float, float]) -> "Axes":
    """Left, bottom, width and height in inches."""
    width, height = figure.get_size_inches()
    return figure.add_axes((place[0] / width, place[1] / height, place[2] / width, place[3] / height))


def draw_panel(axes: "Axes", panel: Panel, named: Collection[Point] | None = None, *, is_listed: bool = False) -> bool:
    """Draw a workload's points, their front and their names.

    Args:
        axes: Empty, and of its final size.
        panel: What is drawn.
        named: Points that get a name; ``None`` for all.
        is_listed: Whether names stand in a list to the right of the axes.

    Returns:
        Whether there was a place for all names; where not, none is written.
    """
    unit_bytes, unit = unit_of(max(point.peak_bytes for point in panel.points))
    _draw_axes(axes, panel, unit_bytes)
    peak = "tracked peak of the step" if panel.is_tracked else "max_memory_allocated of the step"
    axes.set_ylabel(f"{peak}, {unit}", color=INK)
    axes.set_xlabel(_time_words(panel), color=INK)
    axes.set_title(panel.workload, loc="left", color=INK, fontweight="bold", pad=28)
    unbeaten = [(point.time, point.peak_bytes / unit_bytes) for point in front(panel.points)]
    corners = _corners(unbeaten)
    axes.plot(
        *zip(*corners, strict=True),
        color=FAINT,
        linewidth=1.6,
        zorder=2,
        label="Pareto front: nothing is smaller and faster",
    )
    lines = list(pairwise(corners))
    for kind in (PEER, OURS, PLAIN):
        points = [point for point in panel.points if point.kind == kind]
        if not points:
            continue
        times, sizes = [point.time for point in points], [point.peak_bytes / unit_bytes for point in points]
        lows, highs = [point.low for point in points], [point.high for point in points]
        lines += [((low, y), (high, y)) for low, y, high in zip(lows, sizes, highs, strict=True)]
        axes.hlines(sizes, lows, highs, color=COLORS[kind], linewidth=1, alpha=0.45)
        style: dict[str, Any] = {"color": COLORS[kind], "markersize": 9, "markeredgecolor": "white", "linestyle": ""}
        axes.plot(times, sizes, _MARKS[kind], label=WORDS[kind], zorder=4, **style)
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=4,
        frameon=False,
        fontsize=10,
        handletextpad=0.4,
        columnspacing=1.2,
        borderaxespad=0.2,
        borderpad=0,
    )
    names = [
        Name(
            "\n".join(wrap(p.name, _NAME_WIDTH, break_long_words=False)),
            (p.time, p.peak_bytes / unit_bytes),
            COLORS[p.kind],
        )
        for p in (panel.points if named is None else named)
    ]
    spots = [(point.time, point.peak_bytes / unit_bytes) for point in panel.points]
    if is_listed:
        list_names(axes, names, _SIZE)
        return True
    return place_names(axes, names, spots, lines, _SIZE)


def _corners(unbeaten: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of the stairs through the front: as small as so far until the next is reached."""
    corners: list[tuple[float, float]] = []
    for time, size in unbeaten:
        if corners:
            corners.append((time, corners[-1][1]))
        corners.append((time, size))
    return corners


def _draw_axes(axes: "Axes", panel: Panel, unit_bytes: int) -> None:
    ends = [point.low for point in panel.points] + [point.high for point in panel.points]
    width = max(max(ends) - min(ends), 0.1 * max(ends))
    axes.set_xlim(max(min(ends) - _MARGIN * width, 0), max(ends) + _MARGIN * width)
    axes.set_ylim(0, _HEADROOM * max(point.peak_bytes for point in panel.points) / unit_bytes)
    axes.tick_params(length=0, colors=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def _time_words(panel: Panel) -> str:
    if panel.first is None:
        return "step time, seconds"
    known = f" ({format_seconds(panel.first_seconds)})" if panel.first_seconds is not None else ""
    return f"step time relative to {panel.first}{known}"


def _note(panel: Panel) -> str:
    """What did not run, and why."""
    if not panel.failed:
        return ""
    reasons: dict[str, list[str]] = {}
    for name, reason in panel.failed:
        reasons.setdefault(reason, []).append(name)
    text = "Did not run: " + "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items()) + "."
    return "\n".join(wrap(text, _NOTE_WIDTH))
