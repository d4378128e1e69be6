"""The picture of an estimate, with matplotlib and as a page: what is alive through a step, under the limit."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.memory.tracking.timeline import Phase
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.estimate.rows import fact_rows
from lightning_vram.report.estimate.step import COLORS, CONTEXT_COLOR, Step, read_step
from lightning_vram.report.estimate.words import (
    legend_rows,
    limit_bytes,
    limit_line,
    peak_line,
    reserved_line,
    step_scale,
    step_words,
    verdict,
)
from lightning_vram.report.pictures import BAD, FAINT, FONT, GOOD, INK, save_figure, style_axes
from lightning_vram.report.scale import Scale
from lightning_vram.report.tables import label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIZE = (12.0, 6.0)  # inches
_MAX_COLUMNS = 1600
_SHADES = {Phase.FORWARD: "#f6f8fa", Phase.BACKWARD: "#eaeef2", Phase.OPTIMIZER_STEP: "#f0f4ee"}
_LEFT, _WORDS, _RIGHT, _LINE = 0.07, 0.745, 0.985, 0.052  # of the picture
_MIN_LABELLED = 0.07  # of the width
_HALF_WORDS = 0.16  # of the width: half of the words at the peak
_ROW = 0.052  # of the height: a row of words
_MOST_BESIDE = 36  # characters of a fact on one line


def draw(estimate: MemoryEstimate, title: str = "") -> "Figure":
    """Draw an estimate with matplotlib."""
    from matplotlib import rc_context  # an extra: not everybody has it
    from matplotlib.figure import Figure

    step, scale = read_step(estimate.timeline, _MAX_COLUMNS, estimate.main_stage.first_event), step_scale(estimate)
    with rc_context(FONT):
        figure = Figure(figsize=_SIZE, facecolor="white")
        axes = figure.add_axes((_LEFT, 0.1, 0.65, 0.74))
        _draw_axes(axes, step, scale)
        draw_phases(axes, step, scale)
        draw_areas(axes, step)
        _draw_lines(axes, estimate, step, scale)
        _mark_peak(axes, estimate, step, scale)
        _draw_words(figure, estimate, step, title or verdict(estimate))
    return figure


def save(estimate: MemoryEstimate, path: Path, title: str = "") -> None:
    """Draw an estimate into a file in the format of its name: ``.png``, ``.svg``, ``.pdf``."""
    save_figure(draw(estimate, title), path)


def _draw_axes(axes: "Axes", step: Step, scale: Scale) -> None:
    axes.set_xlim(0, len(step.columns))
    axes.set_ylim(0, scale.end_bytes)
    axes.set_yticks(scale.ticks, [scale.label(tick) for tick in scale.ticks])
    axes.set_ylabel(scale.unit, color=INK)
    axes.set_xticks([])
    axes.set_xlabel(step_words(step), color=FAINT)
    style_axes(axes, grid="y")


def draw_phases(axes: "Axes", step: Step, scale: Scale) -> None:
    """Shade forward, backward and optimizer step, and name them above where the name fits."""
    for span in step.spans:
        axes.axvspan(span.start, span.end, color=_SHADES[span.phase], linewidth=0, zorder=0)
        if span.start:
            axes.axvline(span.start, color="white", linewidth=1.5, zorder=0.5)
        if span.end - span.start >= _MIN_LABELLED * len(step.columns) and not span.is_rest:
            middle, above = (span.start + span.end) / 2, scale.end_bytes * 1.012
            axes.text(middle, above, label(span.phase), ha="center", va="bottom", color=FAINT)


def draw_areas(axes: "Axes", step: Step, context_bytes: int = 0) -> None:
    """Draw bytes by category, stacked, on the context if there is one."""
    edges = range(len(step.columns) + 1)
    base = [float(context_bytes)] * len(step.columns)
    if context_bytes:
        axes.stairs(base, edges, fill=True, color=CONTEXT_COLOR)
    for category in step.categories:
        top = [low + column.by_category[category] for low, column in zip(base, step.columns, strict=True)]
        axes.stairs(top, edges, baseline=base, fill=True, color=COLORS[category], linewidth=0)
        base = top


def _draw_lines(axes: "Axes", estimate: MemoryEstimate, step: Step, scale: Scale) -> None:
    """What is reserved and the limit; the words of two close lines stand above both."""
    reserved, limit = estimate.reserved_bytes, limit_bytes(estimate)
    right, row, color = axes.get_xlim()[1], _ROW * scale.end_bytes, _color(estimate)
    words, name = reserved_line(estimate), limit_line(estimate)
    if words:
        y = limit + row if scale.has_limit and 0 <= limit - reserved < row else reserved
        axes.axhline(reserved, color=INK, linewidth=1, linestyle=(0, (4, 3)))
        place, side = (0.992, "right") if step.peak < right / 2 else (0.008, "left")  # away from the words at the peak
        axes.text(place * right, y, words, va="bottom", ha=side, color=INK, fontsize=11)
    style: dict[str, Any] = {"ha": "right", "color": color, "fontsize": 11, "fontweight": "bold"}
    if scale.has_limit:
        axes.axhline(limit, color=color, linewidth=2)
        if not estimate.fits:
            axes.axhspan(limit, scale.end_bytes, color=BAD, alpha=0.08, linewidth=0)
        y = reserved + row if words and 0 < reserved - limit < row else limit
        axes.text(0.992 * right, y, name, va="bottom", **style)
    elif name:
        axes.text(0.992 * right, scale.end_bytes - row, f"{name} \N{UPWARDS ARROW}", va="top", **style)


def _mark_peak(axes: "Axes", estimate: MemoryEstimate, step: Step, scale: Scale) -> None:
    x, y, width = step.peak + 0.5, estimate.peak_bytes, len(step.columns)
    axes.plot((x, x), (y, scale.end_bytes * 0.945), color=INK, linewidth=1)
    axes.plot(x, y, "o", color=INK, markersize=7, markeredgecolor="white", markeredgewidth=1.5)
    middle = min(max(x, _HALF_WORDS * width), (1 - _HALF_WORDS) * width)
    axes.text(middle, scale.end_bytes * 0.99, peak_line(estimate), ha="center", va="top", fontsize=11, color=INK)


def _draw_words(figure: "Figure", estimate: MemoryEstimate, step: Step, title: str) -> None:
    from matplotlib.patches import Rectangle

    size = min(17, 1180 / len(title))  # one line, whatever the device is called
    figure.text(_LEFT, 0.965, title, va="top", fontsize=size, fontweight="bold", color=_color(estimate))
    figure.text(_WORDS, 0.84, "tensors at the peak", va="top", fontweight="bold", color=INK)
    y = 0.765
    for name, color, num_bytes in legend_rows(estimate, step):
        figure.add_artist(Rectangle((_WORDS, y - 0.014), 0.014, 0.028, color=color, linewidth=0))
        figure.text(_WORDS + 0.022, y, name, va="center", color=INK)
        figure.text(_RIGHT, y, format_bytes(num_bytes), va="center", ha="right", color=INK)
        y -= _LINE
    y -= 0.5 * _LINE
    style: dict[str, Any] = {"va": "center", "color": FAINT, "fontsize": 10.5}
    for name, value in fact_rows(estimate):
        figure.text(_WORDS, y, name, **style)
        y -= 0.8 * _LINE * (len(name + value) > _MOST_BESIDE)
        figure.text(_RIGHT, y, value, ha="right", **style)
        y -= 0.9 * _LINE


def _color(estimate: MemoryEstimate) -> str:
    return GOOD if estimate.fits else BAD
