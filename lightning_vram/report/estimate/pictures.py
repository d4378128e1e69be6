"""The picture of an estimate: what is alive through a step, under the limit."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.drawing import LETTER, WIDTHS, Picture, Scale, fill, rectangle, text_at
from lightning_vram.report.estimate.step import (
    COLORS,
    Step,
    limit_bytes,
    limit_line,
    operator_name,
    peak_line,
    peak_sentence,
    read_step,
    reserved_line,
    step_scale,
    step_words,
    tables_of,
    verdict,
)
from lightning_vram.report.tables import Rows, label

HEIGHT, LEFT, TOP, BOTTOM, MARGIN = 480, 56, 30, 440, 8  # of the area in which is drawn; MARGIN is at its right
_ROW_PIXELS = 19  # of words
_TITLE = 30  # pixels above each of several steps
_MAX_MODULES = 40


def picture(estimate: MemoryEstimate, title: str = "") -> Picture:
    """Draw an estimate."""
    step, scale = _read(estimate), step_scale(estimate)
    data = json.dumps(_data(step), separators=(",", ":")).replace("<", "\\u003c")  # nothing ends the script
    side, tables = tables_of(estimate, _MAX_MODULES)
    return Picture(
        title=title or verdict(estimate),
        is_good=estimate.fits,
        lead=peak_sentence(estimate),
        name=step_words(step),
        height=HEIGHT,
        draw=lambda width: _Drawing(estimate, step, scale, width - MARGIN).elements(),
        side=side,
        tables=tables,
        notes=estimate.notes,
        script=fill("estimate/pointer.html", data=data),
    )


def side_by_side(estimates: Mapping[str, MemoryEstimate], title: str, notes: Sequence[str] = ()) -> Picture:
    """Draw steps next to each other, on one scale, by their names."""
    shown = list(estimates.values())
    steps = [_read(estimate) for estimate in shown]
    scale = max(map(step_scale, shown), key=lambda scale: scale.end_bytes)
    kinds = [kind for kind in reversed(COLORS) if any(kind in step.categories for step in steps)]
    lines = [(label(kind), *(format_bytes(estimate.by_category[kind]) for estimate in shown)) for kind in kinds]

    def draw(width: int) -> Iterable[str]:
        part = width // len(shown)
        for number, (name, estimate, step) in enumerate(zip(estimates, shown, steps, strict=True)):
            words = text_at(LEFT, 0, name, "strong" if estimate.fits else "strong bad")
            drawn = "".join(_Drawing(estimate, step, scale, part - MARGIN).elements())
            yield f'<g transform="translate({number * part} {_TITLE})">{words}{drawn}</g>'

    return Picture(
        title=title,
        lead="",
        name=title,
        height=HEIGHT + _TITLE,
        draw=draw,
        side=[Rows("tensors at the peak", lines, [COLORS[kind] for kind in kinds])],
        notes=notes,
    )


def _read(estimate: MemoryEstimate) -> Step:
    return read_step(estimate.timeline, WIDTHS["wide"], estimate.main_stage.first_event)


@dataclass(frozen=True)
class _Drawing:
    estimate: MemoryEstimate
    step: Step
    scale: Scale
    right: int

    def elements(self) -> Iterable[str]:
        yield from self._phases()
        yield from self._axis()
        yield from self._areas()
        yield from self._lines()
        yield from self._peak()
        yield text_at((LEFT + self.right) / 2, BOTTOM + 26, step_words(self.step), "middle faint small")

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
        is_right = self.step.peak < len(self.step.columns) / 2  # away from the words at the peak
        x, side = (self.right - 8, "end small") if is_right else (LEFT + 8, "small")
        reserved, limit = self._y(self.estimate.reserved_bytes), self._y(limit_bytes(self.estimate))
        words, name = reserved_line(self.estimate), limit_line(self.estimate)
        if words:
            y = limit - _ROW_PIXELS if self.scale.has_limit and 0 <= reserved - limit < _ROW_PIXELS + 6 else reserved
            yield f'<path class="needed" d="M{LEFT} {reserved:.1f}H{self.right}"/>{text_at(x, y - 6, words, side)}'
        if self.scale.has_limit:
            if not self.estimate.fits:
                yield rectangle(LEFT, TOP, self.right - LEFT, limit - TOP, "beyond")
            y = reserved - _ROW_PIXELS if words and 0 < limit - reserved < _ROW_PIXELS + 6 else limit
            yield f'<path class="limit {verdict}" d="M{LEFT} {limit:.1f}H{self.right}"/>'
            yield text_at(x, y - 6, name, f"{side} strong {verdict}")
        elif name:
            yield text_at(x, TOP + 18 + _ROW_PIXELS, f"{name} \N{UPWARDS ARROW}", f"{side} strong {verdict}")

    def _peak(self) -> Iterable[str]:
        x, y, words = self._x(self.step.peak + 0.5), self._y(self.estimate.peak_bytes), peak_line(self.estimate)
        half = LETTER * len(words) / 2
        middle = min(max(x, LEFT + half), self.right - half)
        yield f'<path class="pointer" d="M{x:.1f} {y:.1f}V{TOP + 22}"/>'
        yield f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
        yield text_at(middle, TOP + 17, words, "middle small")


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
