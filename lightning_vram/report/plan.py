"""A plan as people see it: a table, a picture."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.text import Text
from typing_extensions import override

from lightning_vram.memory.units import format_bytes
from lightning_vram.planner.plan import MemoryPlan
from lightning_vram.planner.plan import plan_memory as _plan_memory
from lightning_vram.planner.scheme import Measured, Scheme
from lightning_vram.report.drawing import WIDTH, Picture, rectangle, slowest_shown, text_at, ticks, unit_of
from lightning_vram.report.progress import shown
from lightning_vram.report.tables import Rows, add_names, add_numbers, as_text, literal, plain_table

TIMES = "step time relative to baseline (modelled)"


def verdict(plan: MemoryPlan) -> str:
    """What a plan does, in one line."""
    sizes = f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.budget_bytes)} on {plan.device.name}"
    if not plan.is_needed:
        return f"Fits without changes: {sizes}. There is nothing to do."
    return f"Fits with this plan: {sizes}, {ratio(plan.step_time_ratio)} the step time"


def ratio(step_time_ratio: float) -> str:
    """Step time relative to the baseline, as text."""
    return "?" if math.isnan(step_time_ratio) else f"{step_time_ratio:.2f}x"


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

    @property
    def fits(self) -> bool:
        """Whether the budget is enough."""
        return self.share <= 1


def cells(rows: Sequence[Choice], name: str = "configuration") -> list[tuple[str, ...]]:
    """Return headings and cells of a table, for any format: numbers first, and a ``*`` for the plan."""
    table: list[tuple[str, ...]] = [("", "memory", "of budget", "step time", "results", name)]
    for number, one in enumerate(rows, start=1):
        mark, share = "* " if one.is_plan else "", "?" if math.isnan(one.share) else f"{one.share:.1%}"
        numbers = format_bytes(one.needed_bytes), share, ratio(one.step_time_ratio)
        table.append((f"{mark}{number}", *numbers, one.results, one.name))
    return table


def choices(plan: MemoryPlan, name: Callable[[Scheme], str] = str) -> tuple[Choice, ...]:
    """Return this run, the plan, and other configurations worth a look, from the most memory to the least.

    That is what nothing else beats in memory and time at once, those first whose memory is closest to the plan's; then
    the fastest that fits of each other set of features. Without a plan, what needs least takes its place.
    """
    found, budget_bytes = plan.found, plan.budget_bytes
    taken, plain = found.taken, found.plain
    shown = [taken] + ([plain] if taken is not plain else [])
    for one in sorted(found.unbeaten, key=lambda one: abs(one.needed_bytes - taken.needed_bytes)):
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
        )
        for one in sorted(shown[:_MAX_CHOICES], key=lambda one: -one.needed_bytes)
    )


def _set_of(one: Measured) -> tuple[str, ...]:
    """Its features, whatever their arguments."""
    return tuple(part.name for part in one.scheme.parts)


def plan_table(plan: MemoryPlan) -> RenderableType:
    """Everything in a plan, but for its YAML. One line where the run fits without changes."""
    answer = Text(verdict(plan), style="bold green")
    if not plan.is_needed:
        return answer
    rows = choices(plan)
    headings, *lines = cells(rows)
    table = plain_table()
    add_numbers(table, *headings[:-1])
    add_names(table, headings[-1])
    for one, line in zip(rows, lines, strict=True):
        table.add_row(*map(literal, line), style="bold green" if one.is_plan else "" if one.fits else "dim")
    note = Text("* the plan. Step times are modelled for this device, relative to the baseline.")
    layers: list[RenderableType] = ["", Text("Layers of the plan:"), Text(plan.best.layers)] if plan.best.layers else []
    return Group(answer, "", table, "", note, *layers)


_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 460, 56, WIDTH - 14, 56, 404
_AXIS_MARGIN = 0.14  # of an axis, beyond its outermost points


def picture(plan: MemoryPlan) -> Picture:
    """Draw a plan."""
    found = choices(plan)
    rows: list[tuple[str, ...]] = []
    for number, (one, (_, *numbers, _)) in enumerate(zip(found, cells(found)[1:], strict=True), start=1):
        rows += [(f"{number}. {'the plan: ' * one.is_plan}{one.name}",), tuple(numbers)]
    return Picture(
        verdict(plan),
        lead=f"Memory against {TIMES}.",
        name="memory needed",
        height=_HEIGHT,
        drawing="".join(_draw(plan, found)),
        side=[Rows("memory", rows, columns=("of budget", "step time", "results"))],
        is_good=True,
    )


def _draw(plan: MemoryPlan, found: Sequence[Choice]) -> Iterator[str]:
    unit_bytes, unit = unit_of(max(found[0].needed_bytes, plan.budget_bytes))
    times = [one.step_time_ratio for one in found]
    first, last = _axis(min(times), slowest_shown(times), 0.1)
    most_bytes = max(found[0].needed_bytes, plan.budget_bytes)
    low, high = _axis(min(found[-1].needed_bytes, plan.budget_bytes), most_bytes, 0.1 * most_bytes)
    low = max(low, 0)

    def at(time: float, num_bytes: float) -> tuple[float, float]:
        x = _LEFT + (min(time, last) - first) / (last - first) * (_RIGHT - _LEFT)
        return x, _BOTTOM - (num_bytes - low) / (high - low) * (_BOTTOM - _TOP)

    limit = at(first, plan.budget_bytes)[1]
    yield rectangle(_LEFT, _TOP, _RIGHT - _LEFT, limit - _TOP, "beyond")
    for time in ticks(first, last, 8):
        x = at(time, low)[0]
        yield f'<path class="grid" d="M{x:.1f} {_TOP}V{_BOTTOM}"/>{text_at(x, _BOTTOM + 20, f"{time:g}", "middle")}'
    for size in ticks(low / unit_bytes, high / unit_bytes, 6):
        y = at(first, size * unit_bytes)[1]
        yield f'<path class="grid" d="M{_LEFT} {y:.1f}H{_RIGHT}"/>{text_at(_LEFT - 8, y + 5, f"{size:g}", "end")}'
    yield f'<path class="limit bad" d="M{_LEFT} {limit:.1f}H{_RIGHT}"/>'
    yield text_at(_LEFT, _TOP - 32, f"budget {format_bytes(plan.budget_bytes)}", "strong bad")
    yield text_at(_LEFT - 10, _TOP - 8, unit, "end faint")
    yield text_at((_LEFT + _RIGHT) / 2, _BOTTOM + 44, TIMES, "middle small faint")
    tried = [(one.seconds / plan.found.plain.seconds, one.needed_bytes) for one in plan.found.tried]
    yield from (f'<circle class="other" cx="{x:.1f}" cy="{y:.1f}" r="4"/>' for x, y in (at(*one) for one in tried))
    for number, one in enumerate(found, start=1):
        x, y = at(one.step_time_ratio, one.needed_bytes)
        kind = "good" if one.is_plan else "" if one.fits else "faint"
        yield f'<circle class="mark {kind}" cx="{x:.1f}" cy="{y:.1f}" r="11"/>'
        yield text_at(x, y + 5, str(number), "middle small strong inside")
        if one.step_time_ratio > last:  # far slower than the others: at the end of the axis
            yield text_at(x, y + 27, ratio(one.step_time_ratio), "end small")


def _axis(first: float, last: float, least: float) -> tuple[float, float]:
    margin = _AXIS_MARGIN * max(last - first, least)
    return first - margin, last + margin


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


plan_memory = shown(_plan_memory, ShownPlan)
