"""The picture of a plan: what there is to choose from, by memory and time, under the budget."""

from collections.abc import Sequence
from itertools import count
from math import hypot
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from lightning_vram.memory.units import format_bytes
from lightning_vram.planner.plan import MemoryPlan
from lightning_vram.report.estimate.scale import unit_of
from lightning_vram.report.pictures import BAD, FAINT, FONT, GOOD, GRID, INK, save_figure
from lightning_vram.report.plan.choices import Choice, choices
from lightning_vram.report.plan.words import ratio, verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE = (12.0, 6.0)  # inches
_LEFT, _KEY = 0.07, 0.635  # of the picture
_KEY_WIDTH = 50  # characters
_DOT = "#afb8c1"
_KEY_TOP, _KEY_HEIGHT, _KEY_LINE = 0.86, 0.82, 0.038  # of the picture
_GAP = 0.6  # of a line
_POINTS, _WIDTH = 72, 20  # to an inch; of a marker
_MARGIN = 0.14  # of the axis, beyond its outermost points


def draw(plan: MemoryPlan) -> "Figure":
    """Draw a plan with matplotlib.

    Args:
        plan: Its choices have numbers, those of its table. What else was tried is a dot, unless it is slower than all
            of them.

    Raises:
        ModuleNotFoundError: If matplotlib is not installed.
    """
    from matplotlib import rc_context  # an extra: not everybody has it
    from matplotlib.figure import Figure

    found = choices(plan)
    with rc_context(FONT):
        figure = Figure(figsize=_SIZE, facecolor="white")
        axes = figure.add_axes((_LEFT, 0.11, 0.535, 0.75))
        unit_bytes, unit = unit_of(max(found[0].needed_bytes, plan.budget_bytes))
        _draw_axes(axes, plan, found, unit_bytes)
        axes.set_ylabel(f"memory needed, {unit}", color=INK)
        _draw_budget(axes, plan, unit_bytes)
        _draw_others(axes, plan, unit_bytes)
        _draw_choices(axes, found, unit_bytes)
        title = verdict(plan)
        size = min(17, 1180 / len(title))  # one line, whatever the device is called
        figure.text(_LEFT, 0.965, title, va="top", fontsize=size, fontweight="bold", color=GOOD)
        _draw_key(figure, found)
    return figure


def save(plan: MemoryPlan, path: Path) -> None:
    """Draw a plan into a file whose name says its format: ``.png``, ``.svg``, ``.pdf``."""
    save_figure(draw(plan), path)


def _draw_axes(axes: "Axes", plan: MemoryPlan, found: Sequence[Choice], unit_bytes: int) -> None:
    times = [one.step_time_ratio for one in found]
    sizes = [one.needed_bytes / unit_bytes for one in found] + [plan.budget_bytes / unit_bytes]
    width, height = max(max(times) - min(times), 0.1), max(max(sizes) - min(sizes), 0.1 * max(sizes))
    axes.set_xlim(min(times) - _MARGIN * width, max(times) + _MARGIN * width)
    axes.set_ylim(max(min(sizes) - _MARGIN * height, 0), max(sizes) + _MARGIN * height)
    axes.set_xlabel("step time relative to baseline (modelled)", color=FAINT)
    axes.tick_params(length=0, colors=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def _draw_budget(axes: "Axes", plan: MemoryPlan, unit_bytes: int) -> None:
    budget, (left, _), (_, top) = plan.budget_bytes / unit_bytes, axes.get_xlim(), axes.get_ylim()
    axes.axhspan(budget, top, color=BAD, alpha=0.06, linewidth=0, zorder=0)
    axes.axhline(budget, color=BAD, linewidth=2, zorder=1)
    style: dict[str, Any] = {"textcoords": "offset points", "color": BAD, "fontsize": 11, "fontweight": "bold"}
    axes.annotate(f"budget {format_bytes(plan.budget_bytes)}", (left, budget), xytext=(6, 5), **style)


def _draw_others(axes: "Axes", plan: MemoryPlan, unit_bytes: int) -> None:
    times = [one.seconds / plan.found.plain.seconds for one in plan.found.tried]
    sizes = [one.needed_bytes / unit_bytes for one in plan.found.tried]
    axes.plot(times, sizes, "o", color=_DOT, markersize=5, zorder=2)
    place: dict[str, Any] = {"transform": axes.transAxes, "ha": "right", "va": "top", "fontsize": 10}
    axes.text(0.99, 0.985, "dots: other configurations", color=FAINT, **place)


def _draw_choices(axes: "Axes", found: Sequence[Choice], unit_bytes: int) -> None:
    from matplotlib.transforms import ScaledTranslation

    unbeaten = sorted((one.step_time_ratio, -one.needed_bytes / unit_bytes) for one in found if one.is_unbeaten)
    times, sizes = [time for time, _ in unbeaten], [-size for _, size in unbeaten]
    axes.plot(times, sizes, color=FAINT, linewidth=1.5, drawstyle="steps-post", zorder=3)
    places = [(one.step_time_ratio, one.needed_bytes / unit_bytes) for one in found]
    for number, (one, place, shift) in enumerate(zip(found, places, _shifts(axes, places), strict=True), start=1):
        size = 21 if one.is_plan else 17
        aside = axes.transData + ScaledTranslation(shift / _POINTS, 0, axes.figure.dpi_scale_trans)
        axes.plot(*place, "o", color=_color(one), markersize=size, markeredgecolor="white", zorder=4, transform=aside)
        style: dict[str, Any] = {"color": "white", "fontsize": 11, "fontweight": "bold", "zorder": 5}
        style |= {"xytext": (shift, 0), "textcoords": "offset points"}
        axes.annotate(str(number), place, ha="center", va="center_baseline", **style)


def _shifts(axes: "Axes", places: Sequence[tuple[float, float]]) -> list[int]:
    """Return how many points to the right each marker stands, so that none lies on another: its dot stays."""
    taken: list[tuple[float, float]] = []
    shifts = []
    for place in places:
        x, y = axes.transData.transform(place) * _POINTS / axes.figure.dpi
        shift = next(n for n in count(0, _WIDTH) if all(hypot(x + n - a, y - b) >= _WIDTH for a, b in taken))
        taken.append((x + shift, y))
        shifts.append(shift)
    return shifts


def _draw_key(figure: "Figure", found: Sequence[Choice]) -> None:
    names = [wrap(f"the plan: {one.name}" if one.is_plan else one.name, _KEY_WIDTH) for one in found]
    line = min(_KEY_LINE, _KEY_HEIGHT / sum(len(name) + 1 + _GAP for name in names))
    size = min(10.0, 0.8 * line * _SIZE[1] * 72)
    y = _KEY_TOP
    for number, (one, name) in enumerate(zip(found, names, strict=True), start=1):
        figure.text(_KEY, y, str(number), va="top", fontsize=size, fontweight="bold", color=_color(one))
        for part in name:
            weight, color = ("bold", GOOD) if one.is_plan else ("normal", INK)
            figure.text(_KEY + 0.022, y, part, va="top", fontsize=size, fontweight=weight, color=color)
            y -= line
        numbers = (format_bytes(one.needed_bytes), f"{one.share:.1%} of the budget", ratio(one.step_time_ratio))
        text = ", ".join((*numbers, one.results))
        figure.text(_KEY + 0.022, y, text, va="top", fontsize=size, color=FAINT)
        y -= line * (1 + _GAP)


def _color(one: Choice) -> str:
    if one.is_plan:
        return GOOD
    return INK if one.fits and one.is_unbeaten else FAINT
