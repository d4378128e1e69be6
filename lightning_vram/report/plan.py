"""A plan as people see it: a table, a picture."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import isnan

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from lightning_vram.memory.units import format_bytes
from lightning_vram.planner.plan import MemoryPlan
from lightning_vram.planner.plan import plan_memory as _plan_memory
from lightning_vram.planner.scheme import Measured, Scheme
from lightning_vram.report.drawing import (
    Box,
    Picture,
    Spot,
    box_around,
    lines_between,
    place_labels,
    rectangle,
    round_step,
    slowest_shown,
    stairs,
    text_at,
    unit_of,
)
from lightning_vram.report.progress import shown, shows_progress
from lightning_vram.report.tables import Name, Rows, add_names, add_numbers, as_text, literal, plain_table

TIMES = "step time relative to baseline (modelled)"
DOTS = "other configurations"
SLOWER = "slower than the axis"


def verdict(plan: MemoryPlan) -> str:
    """What a plan does, in one line."""
    sizes = f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)} on {plan.device.name}"
    if not plan.is_needed:
        return f"Fits without changes: {sizes}. There is nothing to do."
    return f"Fits with this plan: {sizes}, {ratio(plan.step_time_ratio)} the step time"


def ratio(step_time_ratio: float) -> str:
    """Step time relative to the baseline, as text."""
    return f"{step_time_ratio:.2f}x"


_MAX_CHOICES = 8
_CLOSE = 0.02  # of the budget: what differs by less is one choice


@dataclass(frozen=True)
class Choice:
    """A row of a table of configurations, and a point of the picture."""

    name: str
    needed_bytes: int
    share: float  # of the budget; NaN: unknown
    step_time_ratio: float  # relative to the baseline; NaN: unknown
    results: str  # "exact", "lossless" or "approximate"
    is_plan: bool
    is_unbeaten: bool = False  # no tried configuration is better in memory and time at once

    @property
    def fits(self) -> bool:
        """Whether the budget is enough."""
        return self.share <= 1


def cells(rows: Sequence[Choice], name: str = "configuration") -> list[tuple[str, ...]]:
    """Return headings and cells of a table, for any format: numbers first, and a ``*`` for the plan."""
    table: list[tuple[str, ...]] = [("", "memory", "of budget", "step time", "results", name)]
    for number, one in enumerate(rows, start=1):
        mark, share = "* " if one.is_plan else "", "?" if isnan(one.share) else f"{one.share:.1%}"
        time = "?" if isnan(one.step_time_ratio) else f"{one.step_time_ratio:.2f}x"
        table.append((f"{mark}{number}", format_bytes(one.needed_bytes), share, time, one.results, one.name))
    return table


def choices(plan: MemoryPlan, name: Callable[[Scheme], str] = str) -> tuple[Choice, ...]:
    """Return this run, the plan, and other configurations worth a look, from the most memory to the least.

    That is what nothing else beats in memory and time at once, those first whose memory is closest to the plan's; then
    the fastest that fits of each other set of features. Without a plan, what needs least takes its place.
    """
    found, budget_bytes, unbeaten = plan.found, plan.budget_bytes, plan.found.unbeaten
    taken, plain = found.taken, found.plain
    shown = [taken] + ([plain] if taken is not plain else [])
    for one in sorted(unbeaten, key=lambda one: abs(one.needed_bytes - taken.needed_bytes)):
        if min(abs(one.needed_bytes - other.needed_bytes) for other in shown) > _CLOSE * budget_bytes:
            shown.append(one)
    for one in sorted(found.tried, key=lambda one: one.seconds):
        if one.needed_bytes <= budget_bytes and _set_of(one) not in map(_set_of, shown):
            shown.append(one)
    return tuple(
        Choice(
            name=name(one.scheme),
            needed_bytes=one.needed_bytes,
            share=one.needed_bytes / budget_bytes,
            step_time_ratio=one.seconds / plain.seconds,
            results=one.scheme.exactness.results,
            is_plan=one is found.best,
            is_unbeaten=any(one is other for other in unbeaten),
        )
        for one in sorted(shown[:_MAX_CHOICES], key=lambda one: -one.needed_bytes)
    )


def _set_of(one: Measured) -> tuple[str, ...]:
    """Its features, whatever their arguments."""
    return tuple(part.name for part in one.scheme.parts)


TIME = "Step times are modelled for this device, relative to the baseline."


def plan_table(plan: MemoryPlan) -> RenderableType:
    """Everything in a plan, but for its YAML. One line where the run fits without changes."""
    answer = Text(verdict(plan), style="bold green")
    if not plan.is_needed:
        return answer
    shown: list[RenderableType] = [
        answer,
        "",
        choices_table(choices(plan)),
        "",
        Text(f"* the plan. {TIME}"),
    ]
    if plan.best.layers:
        shown += ["", Text("Layers of the plan:"), Text(plan.best.layers)]
    return Group(*shown)


def choices_table(rows: Sequence[Choice]) -> Table:
    """Return a table for the terminal, or for a log."""
    headings, *lines = cells(rows)
    table = plain_table()
    add_numbers(table, *headings[:-1])
    add_names(table, headings[-1])
    for one, line in zip(rows, lines, strict=True):
        table.add_row(
            *map(literal, line[:-1]), Name(line[-1]), style="bold green" if one.is_plan else "" if one.fits else "dim"
        )
    return table


_AXIS_MARGIN = 0.14  # of an axis, beyond its outermost points


@dataclass(frozen=True)
class Entry:
    """A numbered point of the picture."""

    spot: Spot
    kind: str  # class of its elements: "good" of the plan, "faint" of what is beaten or too large
    is_plan: bool
    suffix: str = ""  # after the number


@dataclass(frozen=True)
class Chart:
    """A plan's picture: times relative to baseline, sizes in ``unit``."""

    entries: Sequence[Entry]  # one that is far slower than the others is at the end of the axis
    is_slower: Sequence[bool]  # of each entry: slower than the axis goes
    others: Sequence[Spot]
    front: Sequence[Spot]  # corners of the Pareto front
    budget: float
    unit: str
    times: Spot
    sizes: Spot


def read_chart(plan: MemoryPlan) -> Chart:
    """Lay out the choices of a plan, and what else was tried."""
    found = choices(plan)
    unit_bytes, unit = unit_of(max(found[0].needed_bytes, plan.budget_bytes))
    times = [one.step_time_ratio for one in found]
    last = slowest_shown(times)
    left, right = _axis(min(times), last, 0.1)
    budget = plan.budget_bytes / unit_bytes
    sizes = [*(one.needed_bytes / unit_bytes for one in found), budget]
    low, high = _axis(min(sizes), max(sizes), 0.1 * max(sizes))
    is_slower = [time > last for time in times]
    entries = [_entry(one, unit_bytes, right if slow else None) for one, slow in zip(found, is_slower, strict=True)]
    unbeaten = [entry.spot for one, entry in zip(found, entries, strict=True) if one.is_unbeaten]
    tried = [(one.seconds / plan.found.plain.seconds, one.needed_bytes / unit_bytes) for one in plan.found.tried]
    others = [spot for spot in tried if spot[0] <= right and spot not in [entry.spot for entry in entries]]
    front = stairs(sorted(unbeaten, key=lambda spot: (spot[0], -spot[1])))
    return Chart(entries, is_slower, others, front, budget, unit, (left, right), (max(low, 0), high))


def _axis(first: float, last: float, least: float) -> Spot:
    margin = _AXIS_MARGIN * max(last - first, least)
    return first - margin, last + margin


def _entry(one: Choice, unit_bytes: int, end: float | None) -> Entry:
    kind = "good" if one.is_plan else "" if one.fits and one.is_unbeaten else "faint"
    spot = (one.step_time_ratio if end is None else end, one.needed_bytes / unit_bytes)
    return Entry(spot, kind, one.is_plan, "" if end is None else f": {ratio(one.step_time_ratio)}")


_HEIGHT, _LEFT, _TOP, _BOTTOM, _MARGIN = 460, 56, 56, 404, 14
_PIXELS = 4 / 3  # to a point


def picture(plan: MemoryPlan) -> Picture:
    """Draw a plan."""
    chart, budget = read_chart(plan), f"budget {format_bytes(plan.budget_bytes)}"
    rows: list[tuple[str, ...]] = []
    for number, one in enumerate(choices(plan), start=1):
        cells = (format_bytes(one.needed_bytes), f"{one.share:.1%}", ratio(one.step_time_ratio), one.results)
        rows += [(f"{number}. {'the plan: ' * one.is_plan}{one.name}",), cells]
    return Picture(
        verdict(plan),
        lead=f"Memory against {TIMES}.",
        name=f"memory needed, {chart.unit}",
        height=_HEIGHT,
        draw=lambda width: _draw(chart, budget, width - _MARGIN),
        side=[Rows("memory", rows, columns=("of budget", "step time", "results"))],
        is_good=True,
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
        if is_far:
            yield f'<path class="pointer" d="M{x:.1f} {y:.1f}L{label_x:.1f} {label_y:.1f}"/>'
        size = 8 if entry.is_plan else 6
        corners = f"M{x - 6:.1f} {y - 7:.1f}L{x + 7:.1f} {y:.1f}L{x - 6:.1f} {y + 7:.1f}Z"
        circle = f'<circle class="mark {entry.kind}" cx="{x:.1f}" cy="{y:.1f}" r="{size}"/>'
        yield f'<path class="mark {entry.kind}" d="{corners}"/>' if is_slower else circle
        yield text_at(label_x, label_y + 5, text, f"middle strong {entry.kind}")


def _ticks(low: float, high: float, most: int) -> Iterator[tuple[float, str]]:
    step = round_step((high - low) / most)
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        yield number * step, f"{number * step:g}"


@dataclass(frozen=True)
class ShownPlan(MemoryPlan):
    """A :class:`MemoryPlan` whose ``str`` is a table, and which draws itself."""

    @override
    def __str__(self) -> str:
        return as_text(plan_table(self))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw memory against step time of the configurations tried, with the budget.

        Args:
            path: File to write: a picture (``.svg``; ``.png`` and ``.pdf`` by matplotlib), or a page (``.html``), with
                the table of configurations.

        Raises:
            ValueError: If the file has another ending.
            ModuleNotFoundError: If matplotlib is needed and not installed.
        """
        picture(self).write(path)


plan_memory = shown(shows_progress(_plan_memory), ShownPlan)
