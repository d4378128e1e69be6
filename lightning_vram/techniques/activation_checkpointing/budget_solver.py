"""Choose what layers save within a byte budget.

Let ``K`` be what the calls before call ``i`` keep. While the backward of ``i`` runs, the calls after it are gone and
what it recomputes is there::

    base_live[i] + K + working[i] <= budget        for every call
    base_total + (what all calls keep) <= budget   at the end of the forward

The search goes through the layers and keeps, of all partial plans, those that no other beats in both cost and bytes. It
thins them out, takes the calls of a layer as if they ran in a row, and what is offloaded as more budget. Where the
predicted peak of a plan is above the budget all the same, it searches for the largest limit whose plan is not.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from lightning_vram.memory.units import format_argument, format_bytes
from lightning_vram.techniques.activation_checkpointing.budget_plan import (
    NOTHING,
    CallProfile,
    CheckpointPlan,
    Decision,
    Decisions,
    StepProfile,
    find_peak,
    format_table,
    predict_peak,
)

_MAX_STATES, _MAX_OPTIONS, _MAX_SEARCHES = 1024, 64, 12
_UNLIMITED = 1 << 60
_COST_UNITS = 2.0**40  # of a forward: whole numbers, so that plans of the same cost compare equal


class BudgetError(ValueError):
    """No choice fits the budget."""

    def __init__(self, budget_bytes: int, minimum_bytes: int, place: str) -> None:
        super().__init__(
            f"budget={format_bytes(budget_bytes)} is below the minimum of {format_bytes(minimum_bytes)}, which is "
            f"reached {place} with every layer checkpointed. Give at least "
            f"budget='{format_argument(minimum_bytes, round_up=True)}', a smaller batch, or smaller layers."
        )
        self.minimum_bytes = minimum_bytes


def solve(step: StepProfile, budget_bytes: int, offload_bytes: int = 0) -> CheckpointPlan:
    """Choose what every layer keeps so that little is recomputed within a budget of activation bytes at any time.

    At most ``offload_bytes`` travel to the host: nothing is recomputed that they make room for, and no more of them
    travel than are needed. ``BudgetError`` says that even full checkpointing of every layer does not fit.

    Example:
        >>> call = CallProfile("net", base_live_bytes=10, saved_bytes=100, cost=5.0)
        >>> step = StepProfile((call,), base_total_bytes=20)
        >>> solve(step, 119).decisions, solve(step, 120).decisions
        ({'net': frozenset()}, {'net': None})
    """
    minimum_bytes = find_minimum(step, budget_bytes, offload_bytes)
    ways = dict.fromkeys((0, offload_bytes))
    found = [(decisions, away) for away in ways if (decisions := _choose(step, budget_bytes, away)) is not None]
    decisions, away = min(found, key=lambda entry: step.recompute_cost(entry[0]))  # the first of equals: nothing away
    if away:  # no more than needed: the more stay, the higher is the peak
        sizes = range(1, away)
        away = 1 + bisect_left(sizes, 1, key=lambda size: predict_peak(step, decisions, size) <= budget_bytes)
    return _describe(step, decisions, budget_bytes, away, minimum_bytes)


def find_minimum(step: StepProfile, budget_bytes: int, offload_bytes: int = 0) -> int:
    """Return the least possible budget, or raise ``BudgetError`` if this one is below it."""
    minimum_bytes, place = min(find_peak(step, step.decide(NOTHING), away) for away in {0, offload_bytes})
    if budget_bytes < minimum_bytes:
        raise BudgetError(budget_bytes, minimum_bytes, place)
    return minimum_bytes


def plan_nothing(step: StepProfile, budget_bytes: int, offload_bytes: int = 0) -> CheckpointPlan:
    """Return the plan in which all layers are checkpointed and nothing is kept."""
    nothing, minimum_bytes = step.decide(NOTHING), find_minimum(step, budget_bytes, offload_bytes)
    away = 0 if predict_peak(step, nothing) <= minimum_bytes else offload_bytes
    return _describe(step, nothing, budget_bytes, away, minimum_bytes)


def _describe(
    step: StepProfile, decisions: Decisions, budget_bytes: int, offloaded_bytes: int, minimum_bytes: int
) -> CheckpointPlan:
    plan = CheckpointPlan(
        decisions,
        peak_bytes=predict_peak(step, decisions, offloaded_bytes),
        plain_peak_bytes=predict_peak(step, step.decide(None)),
        minimum_bytes=minimum_bytes,
        recompute_share=step.recompute_cost(decisions) / step.cost if step.cost else 0.0,
        offloaded_bytes=offloaded_bytes,
        largest_bytes=step.largest_bytes,
    )
    return replace(plan, table=format_table(step, plan, budget_bytes))


def _choose(step: StepProfile, budget_bytes: int, offload_bytes: int) -> Decisions | None:
    """Return the cheapest decisions found whose predicted peak is within the budget."""
    layers = step.layers()
    options = [_find_options(calls, step) for calls in layers.values()]
    nothing = step.decide(NOTHING)
    best: Decisions | None = nothing if predict_peak(step, nothing, offload_bytes) <= budget_bytes else None
    low_bytes, high_bytes = 0, budget_bytes + offload_bytes
    limit_bytes = high_bytes
    for _ in range(_MAX_SEARCHES):
        picks = next(_search([rows for _, rows in options], limit_bytes, _MAX_STATES), None)
        if picks is None:
            low_bytes = limit_bytes
        else:
            entries = zip(layers, options, picks, strict=True)
            found = {name: decisions[pick] for name, (decisions, _), pick in entries}
            if predict_peak(step, found, offload_bytes) <= budget_bytes:
                best, low_bytes = found, limit_bytes
            else:
                high_bytes = limit_bytes
        if low_bytes == high_bytes:
            break
        limit_bytes = (low_bytes + high_bytes) // 2
    return best


def _find_options(calls: Sequence[CallProfile], step: StepProfile) -> tuple[list[Decision], NDArray[np.int64]]:
    """Return decisions for one layer, plain first, with a row for each: its cost, bytes it keeps, and those it needs.

    Both bytes that are kept and those of results that a plain layer does not save count against operators, by turns.
    """
    unit = step.cost / _COST_UNITS or 1.0
    options: dict[Decision, None] = {None: None}
    for counts_all in (True, False):
        stages, ordinals = [], []
        for ordinal in range(max(len(call.operators) for call in calls)):
            alike = [call.operators[ordinal] for call in calls if ordinal < len(call.operators)]
            saved_cost = round(sum(operator.cost for operator in alike) / unit)
            num_bytes = sum(operator.num_bytes for operator in alike if counts_all or not operator.is_saved)
            if saved_cost:
                ordinals.append(ordinal)
                stages.append(np.array([(0, num_bytes, 0), (saved_cost, 0, 0)]))
        for picks in _search(stages, _UNLIMITED, _MAX_OPTIONS):
            options[frozenset(ordinal for ordinal, pick in zip(ordinals, picks, strict=True) if not pick)] = None
    rows = []
    for decision in options:
        effects = [call.effect(decision) for call in calls]
        *before, total_bytes = accumulate([kept_bytes for kept_bytes, _, _ in effects], initial=0)
        needed = [call.base_live_bytes + b + e[1] for call, b, e in zip(calls, before, effects, strict=True)]
        again = round(sum(cost for _, _, cost in effects) / unit)
        rows.append((again, total_bytes, max(*needed, total_bytes + step.base_total_bytes)))
    return list(options), np.array(rows)


def _search(stages: Sequence[NDArray[np.int64]], limit_bytes: int, max_states: int) -> Iterator[list[int]]:
    """Yield which row of each stage to pick, from the cheapest picks that fit to those that keep least."""
    costs = sizes = np.zeros(1, np.int64)
    trail = []
    for rows in stages:
        new_costs, new_sizes = (rows[:, :1] + costs).ravel(), (rows[:, 1:2] + sizes).ravel()
        states = np.flatnonzero(rows[:, 2:] + sizes <= limit_bytes)
        if not len(states):
            return
        states = states[np.lexsort((new_sizes[states], new_costs[states]))]  # stable: the first rows win ties
        least = np.minimum.accumulate(new_sizes[states])
        states = states[np.r_[True, least[1:] < least[:-1]]]
        if len(states) > max_states:  # the cheapest of each size, and the smallest
            places = new_sizes[states] * max_states // (new_sizes[states[0]] + 1)
            states = states[np.r_[True, places[1:-1] < places[:-2], True]]
        trail.append((states // len(costs), states % len(costs)))
        costs, sizes = new_costs[states], new_sizes[states]
    for state in range(len(costs)):
        picks, place = [], state
        for rows, parents in reversed(trail):
            picks.append(int(rows[place]))
            place = parents[place]
        yield picks[::-1]
