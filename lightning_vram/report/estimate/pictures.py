"""The picture of an estimate, with matplotlib and as a page: what is alive through a step, under the limit."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.memory.tracking.timeline import Phase
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.drawing import (
    BAD,
    FAINT,
    FONT,
    GOOD,
    INK,
    LETTER,
    WIDTHS,
    Scale,
    drawings,
    fill,
    rectangle,
    save_figure,
    style_axes,
    table,
    text_at,
)
from lightning_vram.report.drawing import page as write_page
from lightning_vram.report.estimate.step import (
    COLORS,
    CONTEXT_COLOR,
    Step,
    fact_rows,
    legend_rows,
    limit_bytes,
    limit_line,
    module_name,
    module_rows,
    moment_rows,
    operator_name,
    peak_line,
    peak_sentence,
    process_rows,
    read_step,
    reserved_line,
    step_scale,
    step_words,
    verdict,
)
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


HEIGHT, LEFT, TOP, BOTTOM, MARGIN = 480, 56, 30, 440, 8  # of the area in which is drawn; MARGIN is at its right
_ROW_PIXELS = 19  # of words


def svg_of(estimate: MemoryEstimate, step: Step) -> str:
    """Draw an estimate, for wide and for small screens."""
    name = step_words(step)
    scale = step_scale(estimate)
    return drawings(HEIGHT, name, lambda width: _Drawing(estimate, step, scale, width - MARGIN).elements(name))


@dataclass(frozen=True)
class _Drawing:
    estimate: MemoryEstimate
    step: Step
    scale: Scale
    right: int

    def elements(self, name: str) -> Iterable[str]:
        yield from self._phases()
        yield from self._axis()
        yield from self._areas()
        yield from self._lines()
        yield from self._peak()
        yield text_at((LEFT + self.right) / 2, BOTTOM + 26, name, "middle faint small")

    def _x(self, column: float) -> float:
        return LEFT + column / len(self.step.columns) * (self.right - LEFT)

    def _y(self, num_bytes: float) -> float:
        return BOTTOM - num_bytes / self.scale.end_bytes * (BOTTOM - TOP)

    def _phases(self) -> Iterable[str]:
        for span in self.step.spans:
            left, right = self._x(span.start), self._x(span.end)
            yield rectangle(left, TOP, right - left, BOTTOM - TOP, f"phase {span.phase}")
            if right - left >= LETTER * len(label(span.phase)) and not span.is_rest:
                yield text_at((left + right) / 2, TOP - 10, label(span.phase), "middle faint")

    def _axis(self) -> Iterable[str]:
        for tick in self.scale.ticks:
            y = self._y(tick)
            yield f'<path class="grid" d="M{LEFT} {y:.1f}H{self.right}"/>'
            yield text_at(LEFT - 8, y + 5, self.scale.label(tick), "end")
        yield text_at(LEFT - 8, TOP - 10, self.scale.unit, "end faint")

    def _areas(self) -> Iterable[str]:
        base = [0] * len(self.step.columns)
        for category in self.step.categories:
            top = [size + column.by_category[category] for size, column in zip(base, self.step.columns, strict=True)]
            yield self._area(base, top, COLORS[category])
            base = top

    def _area(self, low: Sequence[int], high: Sequence[int], color: str) -> str:
        """Between two staircases: along the upper one, and back along the lower one."""
        there, back = "".join(self._stairs(high)), "".join(self._stairs(low, is_backwards=True))
        return f'<path fill="{color}" d="M{LEFT} {self._y(high[0]):.1f}{there}{back}Z"/>'

    def _stairs(self, sizes: Sequence[int], *, is_backwards: bool = False) -> Iterable[str]:
        changes = [number for number, (one, other) in enumerate(pairwise(sizes), 1) if one != other]
        if not is_backwards:
            for number in changes:
                yield f"H{self._x(number):.1f}V{self._y(sizes[number]):.1f}"
            yield f"H{self.right}"
            return
        yield f"V{self._y(sizes[-1]):.1f}"
        for number in reversed(changes):
            yield f"H{self._x(number):.1f}V{self._y(sizes[number - 1]):.1f}"
        yield f"H{LEFT}"

    def _lines(self) -> Iterable[str]:
        """What is reserved and the limit; the words of two close lines stand above both."""
        verdict = "good" if self.estimate.fits else "bad"
        reserved, limit = self._y(self.estimate.reserved_bytes), self._y(limit_bytes(self.estimate))
        if self.scale.has_limit:
            if not self.estimate.fits:
                yield rectangle(LEFT, TOP, self.right - LEFT, limit - TOP, "beyond")
            yield f'<path class="limit {verdict}" d="M{LEFT} {limit:.1f}H{self.right}"/>'
        words = reserved_line(self.estimate)
        if words:
            y = limit - _ROW_PIXELS if self.scale.has_limit and 0 <= reserved - limit < _ROW_PIXELS + 6 else reserved
            yield f'<path class="needed" d="M{LEFT} {reserved:.1f}H{self.right}"/>'
            is_right = self.step.peak < len(self.step.columns) / 2  # away from the words at the peak
            yield text_at(self.right - 8 if is_right else LEFT + 8, y - 6, words, "end small" if is_right else "small")
        name = limit_line(self.estimate)
        if self.scale.has_limit:
            y = reserved - _ROW_PIXELS if words and 0 < limit - reserved < _ROW_PIXELS + 6 else limit
            yield text_at(self.right - 8, y - 6, name, f"end small strong {verdict}")
        elif name:
            yield text_at(
                self.right - 8, TOP + 18 + _ROW_PIXELS, f"{name} \N{UPWARDS ARROW}", f"end small strong {verdict}"
            )

    def _peak(self) -> Iterable[str]:
        x, y, words = self._x(self.step.peak + 0.5), self._y(self.estimate.peak_bytes), peak_line(self.estimate)
        half = LETTER * len(words) / 2
        middle = min(max(x, LEFT + half), self.right - half)
        yield f'<path class="pointer" d="M{x:.1f} {y:.1f}V{TOP + 22}"/>'
        yield f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
        yield text_at(middle, TOP + 17, words, "middle small")


_MAX_MODULES = 40


def page(estimate: MemoryEstimate, title: str = "") -> str:
    """Write an estimate as a page of HTML."""
    step = read_step(estimate.timeline, WIDTHS["wide"], estimate.main_stage.first_event)
    data = json.dumps(_data(step), separators=(",", ":")).replace("<", "\\u003c")  # nothing ends the script
    return write_page(
        title or verdict(estimate),
        is_good=estimate.fits,
        lead=peak_sentence(estimate),
        drawing=svg_of(estimate, step),
        side=_categories(estimate, step) + _facts(estimate),
        tables="".join(_tables(estimate)),
        notes="".join(f"<p>Note: {escape(note)}</p>" for note in estimate.notes),
        script=fill("estimate/pointer.html", data=data),
    )


def _data(step: Step) -> dict[str, Any]:
    """What the script shows at the pointer; names that come often stand there once."""
    numbers: dict[str, int] = {}
    columns = [
        [
            *(
                numbers.setdefault(name, len(numbers))
                for name in (label(column.phase), operator_name(column.op), column.module)
            ),
            *(column.by_category[category] for category in step.categories),
        ]
        for column in step.columns
    ]
    categories = [[label(category), COLORS[category]] for category in step.categories]
    return {"area": [LEFT, TOP, MARGIN, BOTTOM], "categories": categories, "names": list(numbers), "columns": columns}


def _categories(estimate: MemoryEstimate, step: Step) -> str:
    legend = legend_rows(estimate, step)
    sizes = [(name, num_bytes) for name, _, num_bytes in legend]
    lines = _with_share(estimate, [*sizes, ("all", estimate.peak_bytes)])
    return table("tensors at the peak", lines, [color for _, color, _ in legend])


def _facts(estimate: MemoryEstimate) -> str:
    facts = fact_rows(estimate)
    return table("the run", facts) if facts else ""


def _tables(estimate: MemoryEstimate) -> Iterable[str]:
    modules = [(module_name(fqn), size) for fqn, size in module_rows(estimate, _MAX_MODULES)]
    yield table("modules at the peak", _with_share(estimate, modules))
    yield table("peak of tensors in each phase", _in_text(moment_rows(estimate)))
    process = process_rows(estimate)
    if len(process) > 1:
        yield table("the process", _in_text(process))


def _with_share(estimate: MemoryEstimate, sizes: Iterable[tuple[str, int]]) -> Iterable[tuple[str, ...]]:
    return ((name, format_bytes(size), f"{size / estimate.peak_bytes:.0%}") for name, size in sizes)


def _in_text(sizes: Iterable[tuple[str, int]]) -> Iterable[tuple[str, ...]]:
    return ((name, format_bytes(size)) for name, size in sizes)
