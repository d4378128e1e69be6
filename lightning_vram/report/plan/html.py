"""The page of a plan: its picture as SVG, and the table of its choices."""

import math
from collections.abc import Iterator, Sequence

from lightning_vram.memory.units import format_bytes
from lightning_vram.planner.plan import MemoryPlan
from lightning_vram.report.numbered import Box, Spot, box_around, lines_between, place_labels
from lightning_vram.report.page import drawings, rectangle, table, text_at
from lightning_vram.report.page import page as write_page
from lightning_vram.report.pictures import FAINT, GOOD
from lightning_vram.report.plan.chart import Chart, read_chart
from lightning_vram.report.plan.choices import choices
from lightning_vram.report.plan.words import DOTS, SLOWER, TIMES, ratio, verdict
from lightning_vram.report.scale import round_step

_HEIGHT, _LEFT, _TOP, _BOTTOM, _MARGIN = 460, 56, 56, 404, 14
_PIXELS = 4 / 3  # to a point
_KINDS = {GOOD: "good", FAINT: "faint"}


def page(plan: MemoryPlan) -> str:
    """Write a plan as a page of HTML, which needs no library."""
    chart, budget = read_chart(plan), f"budget {format_bytes(plan.budget_bytes)}"
    rows: list[tuple[str, ...]] = []
    for number, (one, entry) in enumerate(zip(choices(plan), chart.entries, strict=True), start=1):
        cells = (format_bytes(one.needed_bytes), f"{one.share:.1%}", ratio(one.step_time_ratio), one.results)
        rows += [(f"{number}. {entry.name}",), cells]
    return write_page(
        verdict(plan),
        is_good=True,
        lead=f"Memory against {TIMES}.",
        drawing=drawings(_HEIGHT, f"memory needed, {chart.unit}", lambda width: _draw(chart, budget, width - _MARGIN)),
        side=table("memory", rows, columns=("of budget", "step time", "results")),
    )


def _draw(chart: Chart, budget: str, right: int) -> Iterator[str]:
    (first, last), (low, high) = chart.times, chart.sizes

    def at(spot: Spot) -> Spot:
        x = _LEFT + (spot[0] - first) / (last - first) * (right - _LEFT)
        return x, _BOTTOM - (spot[1] - low) / (high - low) * (_BOTTOM - _TOP)

    limit = at((first, chart.budget))[1]
    yield rectangle(_LEFT, _TOP, right - _LEFT, limit - _TOP, "beyond")
    for time, words in _ticks(first, last, max(4, right // 100)):
        x = at((time, low))[0]
        yield f'<path class="grid" d="M{x:.1f} {_TOP}V{_BOTTOM}"/>{text_at(x, _BOTTOM + 20, words, "middle")}'
    for size, words in _ticks(low, high, 6):
        y = at((first, size))[1]
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{right}"/>{text_at(_LEFT - 8, y + 5, words, "end")}'
    yield f'<path class="limit bad" d="M{_LEFT} {limit:.1f}H{right}"/>'
    yield text_at(_LEFT, _TOP - 32, budget, "strong bad") + text_at(_LEFT - 10, _TOP - 8, chart.unit, "end faint")
    kinds = [f"\N{BULLET} {DOTS}"] * bool(chart.others)
    kinds += [f"\N{BLACK RIGHT-POINTING TRIANGLE} {SLOWER}"] * any(chart.is_slower)
    yield text_at(_LEFT, _TOP - 10, " \N{NO-BREAK SPACE} ".join(kinds), "small faint")
    yield text_at((_LEFT + right) / 2, _BOTTOM + 44, TIMES, "middle small faint")
    yield from (f'<circle class="other" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in map(at, chart.others))
    corners = [at(spot) for spot in chart.front]
    yield f'<path class="front" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in corners)}"/>'
    lines = [*lines_between(corners), (_LEFT, limit, right, limit)]
    lines += [box_around(at(spot), 8, 8) for spot in chart.others]
    yield from _choices(chart, [at(entry.spot) for entry in chart.entries], lines, right)


def _choices(chart: Chart, spots: Sequence[Spot], lines: Sequence[Box], right: int) -> Iterator[str]:
    texts = [f"{number}{entry.suffix}" for number, entry in enumerate(chart.entries, start=1)]
    scale = 1 / _PIXELS
    boxes = [(a * scale, b * scale, c * scale, d * scale) for a, b, c, d in (*lines, (_LEFT, _TOP, right, _BOTTOM))]
    places = place_labels([(x * scale, y * scale) for x, y in spots], texts, boxes[:-1], boxes[-1])
    rows = zip(chart.entries, chart.is_slower, spots, texts, places, strict=True)
    for entry, is_slower, (x, y), text, (middle, is_far) in rows:
        label_x, label_y = middle[0] * _PIXELS, middle[1] * _PIXELS
        kind = _KINDS.get(entry.color, "")
        if is_far:
            yield f'<path class="pointer" d="M{x:.1f} {y:.1f}L{label_x:.1f} {label_y:.1f}"/>'
        size = 8 if entry.is_bold else 6
        corners = f"M{x - 6:.1f} {y - 7:.1f}L{x + 7:.1f} {y:.1f}L{x - 6:.1f} {y + 7:.1f}Z"
        circle = f'<circle class="mark {kind}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>'
        yield f'<path class="mark {kind}" d="{corners}"/>' if is_slower else circle
        yield text_at(label_x, label_y + 5, text, f"middle strong {kind}")


def _ticks(low: float, high: float, most: int) -> Iterator[tuple[float, str]]:
    step = round_step((high - low) / most)
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        yield number * step, f"{number * step:g}"
