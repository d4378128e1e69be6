"""The picture of an estimate as SVG, drawn without a library: colours come from the page, so it has a dark mode."""

from collections.abc import Iterable
from html import escape
from itertools import pairwise

from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.estimate.rows import facts
from lightning_vram.report.estimate.scale import Scale, choose_scale, is_note_above
from lightning_vram.report.estimate.step import COLORS, CONTEXT_COLOR, Step
from lightning_vram.report.estimate.words import legend_rows, needed_line, peak_lines
from lightning_vram.report.tables import label

WIDTH, HEIGHT = 1200, 600
LEFT, TOP, RIGHT, BOTTOM = 62, 36, 905, 560  # of the area in which is drawn
_WORDS = 930  # where the legend begins
_LINE = 29
_MIN_LABELLED = 90


def svg_of(estimate: MemoryEstimate, step: Step) -> str:
    """Draw an estimate.

    Args:
        estimate: Whose limit and needs are drawn.
        step: Columns of its training step.
    """
    scale = choose_scale(estimate)
    parts = [
        *_phases(step),
        *_axis(scale),
        *_areas(estimate, step, scale),
        *_lines(estimate, scale),
        *_peak(estimate, step, scale),
        *_legend(estimate, step),
        _text((LEFT + RIGHT) / 2, BOTTOM + 26, _axis_name(step), "middle faint"),
    ]
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{_axis_name(step)}">{"".join(parts)}</svg>'


def x_of(column: float, step: Step) -> float:
    """Where a column begins."""
    return LEFT + column / len(step.columns) * (RIGHT - LEFT)


def y_of(num_bytes: float, scale: Scale) -> float:
    """How high bytes are."""
    return BOTTOM - num_bytes / scale.end_bytes * (BOTTOM - TOP)


def _axis_name(step: Step) -> str:
    return f"one training step: {step.num_events:,} allocations and frees, in order"


def _phases(step: Step) -> Iterable[str]:
    for span in step.spans:
        left, right = x_of(span.start, step), x_of(span.end, step)
        yield _rectangle(left, TOP, right - left, BOTTOM - TOP, f"phase {span.phase}")
        if right - left >= _MIN_LABELLED and not span.is_rest:
            yield _text((left + right) / 2, TOP - 11, label(span.phase), "middle faint")


def _axis(scale: Scale) -> Iterable[str]:
    for tick in scale.ticks:
        y = y_of(tick, scale)
        yield f'<path class="grid" d="M{LEFT} {y:.1f}H{RIGHT}"/>'
        yield _text(LEFT - 10, y + 5, scale.label(tick), "end")
    yield _text(LEFT - 10, TOP - 11, scale.unit, "end faint")


def _areas(estimate: MemoryEstimate, step: Step, scale: Scale) -> Iterable[str]:
    low, base = [0] * len(step.columns), [estimate.context_bytes] * len(step.columns)
    yield _area(low, base, CONTEXT_COLOR, step, scale)
    for category in step.categories:
        low, base = base, [size + column.by_category[category] for size, column in zip(base, step.columns, strict=True)]
        yield _area(low, base, COLORS[category], step, scale)


def _area(low: list[int], high: list[int], color: str, step: Step, scale: Scale) -> str:
    """Between two staircases: along the upper one, and back along the lower one."""
    there = "".join(_stairs(high, step, scale))
    back = "".join(_stairs(low, step, scale, is_backwards=True))
    return f'<path fill="{color}" d="M{LEFT} {y_of(high[0], scale):.1f}{there}{back}Z"/>'


def _stairs(sizes: list[int], step: Step, scale: Scale, *, is_backwards: bool = False) -> Iterable[str]:
    changes = [number for number, (one, other) in enumerate(pairwise(sizes), 1) if one != other]
    if not is_backwards:
        for number in changes:
            yield f"H{x_of(number, step):.1f}V{y_of(sizes[number], scale):.1f}"
        yield f"H{RIGHT}"
        return
    yield f"V{y_of(sizes[-1], scale):.1f}"
    for number in reversed(changes):
        yield f"H{x_of(number, step):.1f}V{y_of(sizes[number - 1], scale):.1f}"
    yield f"H{LEFT}"


def _lines(estimate: MemoryEstimate, scale: Scale) -> Iterable[str]:
    y = y_of(estimate.needed_bytes, scale)
    yield f'<path class="needed" d="M{LEFT} {y:.1f}H{RIGHT}"/>'
    yield _text(LEFT + 8, y - 6, needed_line(estimate), "small")
    name = f"{estimate.device.name} {format_bytes(estimate.device.memory_bytes)}"
    verdict = "good" if estimate.fits else "bad"
    if not scale.has_limit:
        yield _text(RIGHT - 8, TOP + 20, f"{name} \N{UPWARDS ARROW}", f"end small strong {verdict}")
        return
    y = y_of(estimate.device.memory_bytes, scale)
    if not estimate.fits:
        yield _rectangle(LEFT, TOP, RIGHT - LEFT, y - TOP, "beyond")
    yield f'<path class="limit {verdict}" d="M{LEFT} {y:.1f}H{RIGHT}"/>'
    yield _text(RIGHT - 8, y - 7, name, f"end small strong {verdict}")


def _peak(estimate: MemoryEstimate, step: Step, scale: Scale) -> Iterable[str]:
    x, y = x_of(step.peak + 0.5, step), y_of(estimate.context_bytes + estimate.peak_bytes, scale)
    lines = peak_lines(estimate, step)
    width, height = 8.4 * max(map(len, lines)) + 20, 21 * len(lines) + 14
    is_left = x < (LEFT + RIGHT) / 2
    is_above = is_note_above(estimate, scale)
    left, top = x + 28 if is_left else x - 28 - width, y - 60 - height if is_above else y + 18
    near = left + 14 if is_left else left + width - 14
    yield f'<path class="pointer" d="M{x:.1f} {y:.1f}L{near:.1f} {top + (height if is_above else 0):.1f}"/>'
    yield f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
    yield _rectangle(left, top, width, height, "note")
    for number, line in enumerate(lines, 1):
        yield _text(left + 10, top + 21 * number, line, "small")


def _legend(estimate: MemoryEstimate, step: Step) -> Iterable[str]:
    y = TOP + 12
    yield _text(_WORDS, y, "at the peak", "strong")
    for name, color, num_bytes in legend_rows(estimate, step):
        y += _LINE
        yield f'<rect x="{_WORDS}" y="{y - 13:.1f}" width="16" height="16" fill="{color}"/>'
        yield _text(_WORDS + 26, y, name)
        yield _text(WIDTH - 12, y, format_bytes(num_bytes), "end")
    y += _LINE // 2
    for name, value in facts(estimate):
        y += _LINE
        yield _text(_WORDS, y, name, "faint") + _text(WIDTH - 12, y, value, "end faint")


def _rectangle(x: float, y: float, width: float, height: float, kind: str) -> str:
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'
