"""What the pictures of a plan show: points of memory against time, the axes, and the budget."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_vram.memory.units import format_bytes
from lightning_vram.planner.plan import MemoryPlan
from lightning_vram.report.numbered import Entry, Spot, slowest_shown, stairs
from lightning_vram.report.pictures import FAINT, GOOD, INK
from lightning_vram.report.plan.choices import Choice, choices
from lightning_vram.report.plan.words import ratio
from lightning_vram.report.scale import unit_of

_AXIS_MARGIN = 0.14  # of an axis, beyond its outermost points


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
    time = ratio(one.step_time_ratio)
    details = ", ".join((format_bytes(one.needed_bytes), f"{one.share:.1%} of the budget", time, one.results))
    color = GOOD if one.is_plan else INK if one.fits and one.is_unbeaten else FAINT
    spot = (one.step_time_ratio if end is None else end, one.needed_bytes / unit_bytes)
    name = f"the plan: {one.name}" if one.is_plan else one.name
    return Entry(spot, name, details, color, one.is_plan, "" if end is None else f": {time}")
