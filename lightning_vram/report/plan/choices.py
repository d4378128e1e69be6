"""What there is to choose from, of all that a search has tried."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isnan

from lightning_vram.memory.units import format_bytes
from lightning_vram.planner.measured import Measured
from lightning_vram.planner.plan import MemoryPlan
from lightning_vram.planner.single_remedies import results_of

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


def choices(plan: MemoryPlan) -> tuple[Choice, ...]:
    """Return this run, the plan, and other configurations worth a look, from the most memory to the least.

    That is what nothing else beats in memory and time at once, those first whose memory is closest to the plan's; then
    the fastest that fits of each other set of features.
    """
    shown = [plan.best] + ([plan.found.plain] if plan.is_needed else [])
    unbeaten = plan.found.unbeaten
    for one in sorted(unbeaten, key=lambda one: abs(one.needed_bytes - plan.peak_bytes)):
        if min(abs(one.needed_bytes - other.needed_bytes) for other in shown) > _CLOSE * plan.budget_bytes:
            shown.append(one)
    for one in plan.runners_up:
        if _set_of(one) not in map(_set_of, shown):
            shown.append(one)
    return tuple(
        _choice(plan, one, unbeaten) for one in sorted(shown[:_MAX_CHOICES], key=lambda one: -one.needed_bytes)
    )


def _choice(plan: MemoryPlan, one: Measured, unbeaten: Sequence[Measured]) -> Choice:
    return Choice(
        name=str(one.scheme),
        needed_bytes=one.needed_bytes,
        share=one.needed_bytes / plan.budget_bytes,
        step_time_ratio=one.seconds / plan.found.plain.seconds,
        results=results_of(one.scheme.exactness),
        is_plan=one is plan.best,
        is_unbeaten=any(one is other for other in unbeaten),
    )


def _set_of(one: Measured) -> tuple[str, ...]:
    """Its features, whatever their arguments."""
    return tuple(part.name for part in one.scheme.parts)
