"""The picture of an estimate as SVG, drawn without a library: colours come from the page, so it has a dark mode."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.report.estimate.step import COLORS, Step
from lightning_vram.report.estimate.words import (
    limit_bytes,
    limit_line,
    peak_line,
    reserved_line,
    step_scale,
    step_words,
)
from lightning_vram.report.page import LETTER, drawings, rectangle, text_at
from lightning_vram.report.scale import Scale
from lightning_vram.report.tables import label

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
