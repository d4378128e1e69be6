"""What a training step saves and costs, what a plan makes of it, and the plan as a table.

Everything here describes one round: a forward and its backward. Base bytes are those that no decision changes: inputs
of layers, what is saved outside of all layers, the loss head.

Let ``K`` be what the calls before call ``i`` keep. While the backward of ``i`` runs, the calls after it are gone and
what it recomputes is there::

    base_live[i] + K + working[i] <= budget        for every call
    base_total + (what all calls keep) <= budget   at the end of the forward

The search goes through the layers and keeps, of all partial plans, those that no other beats in both cost and bytes. It
thins them out, takes the calls of a layer as if they ran in a row, and what is offloaded as more budget. Where the
predicted peak of a plan is above the budget all the same, it searches for the largest limit whose plan is not.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, groupby
from operator import itemgetter
from typing import TYPE_CHECKING

from lightning_vram.memory.units import format_argument, format_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Decision = frozenset[int] | None
"""Ordinals, in each call of a layer, of the costly operators whose results are saved; ``None``: it runs plain."""
Decisions = Mapping[str, Decision]
NOTHING: Decision = frozenset()

WINDOW_SHARE = 16
"""Part of what is offloaded that serves copies in flight, on the device, as in ``ActivationOffloading``."""


@dataclass(frozen=True)
class OperatorProfile:
    """The result of one costly operator."""

    name: str  # as in ``torch.ops``: ``"aten.mm"``
    num_bytes: int  # bytes it holds on to if kept: 0 if they are among the base bytes
    is_saved: bool  # whether autograd saves that memory anyway where the layer is plain
    cost: float  # what running it again costs, in FLOP equivalents


@dataclass(frozen=True)
class CallProfile:
    """One call of a layer."""

    layer: str  # path in the model; one decision holds for all its calls
    base_live_bytes: int  # base bytes alive while the backward of this call runs
    saved_bytes: int  # what autograd saves in the call and no one else holds
    cost: float  # what running the whole call again costs, in FLOP equivalents
    operators: tuple[OperatorProfile, ...] = ()  # in the order they run: the place is the ordinal
    input_bytes: int = 0  # base bytes that its backward needs, and fetches if they were offloaded

    def effect(self, decision: Decision) -> tuple[int, int, float]:
        """Return the bytes kept until the backward, those of the call alive during it, and the recomputation's cost."""
        if decision is None:
            return self.saved_bytes, self.saved_bytes, 0.0
        kept = [self.operators[ordinal] for ordinal in decision if ordinal < len(self.operators)]
        unsaved_bytes = sum(operator.num_bytes for operator in kept if not operator.is_saved)
        cost = max(0.0, self.cost - sum(operator.cost for operator in kept))
        return sum(operator.num_bytes for operator in kept), self.saved_bytes + unsaved_bytes, cost


@dataclass(frozen=True)
class StepProfile:
    """One observed round."""

    calls: tuple[CallProfile, ...]  # of all layers, as they ran
    base_total_bytes: int  # base bytes alive at the end of the forward
    other_cost: float = 0.0  # cost of the forward outside all layers. Shares are of the whole forward.
    staying_bytes: int = 0  # the most that can ever be saved of storages that cannot be offloaded
    largest_bytes: int = 0  # the largest storage that can

    @property
    def cost(self) -> float:
        """Cost of the whole forward."""
        return self.other_cost + sum(call.cost for call in self.calls)

    def layers(self) -> dict[str, list[CallProfile]]:
        """Return the calls of each layer, in the order of the first ones."""
        layers: dict[str, list[CallProfile]] = {}
        for call in self.calls:
            layers.setdefault(call.layer, []).append(call)
        return layers

    def decide(self, decision: Decision) -> Decisions:
        """Return one decision for all layers."""
        return {call.layer: decision for call in self.calls}

    def recompute_cost(self, decisions: Decisions) -> float:
        """Cost of all that runs again; layers without a decision recompute everything."""
        return sum(call.effect(decisions.get(call.layer, NOTHING))[2] for call in self.calls)


@dataclass(frozen=True)
class CheckpointPlan:
    """A decision for every layer, and what it comes to."""

    decisions: Decisions
    peak_bytes: int = 0  # predicted peak of activation bytes
    plain_peak_bytes: int = 0  # the same without any recomputation
    minimum_bytes: int = 0  # the same with every layer checkpointed and nothing kept: the least budget
    recompute_share: float = 0.0  # what runs again, as a share of the forward
    offloaded_bytes: int = 0  # of what the forward saves first, so much is to be away until its backward
    largest_bytes: int = 0  # the largest storage among them: tensors are not cut, so that much more may travel
    table: str = field(default="", repr=False)


def predict_peak(step: StepProfile, decisions: Decisions, offloaded_bytes: int = 0) -> int:
    """Predict the peak activation bytes of a round; exact if nothing is offloaded, else an upper bound."""
    return find_peak(step, decisions, offloaded_bytes)[0]


def find_peak(step: StepProfile, decisions: Decisions, offloaded_bytes: int = 0) -> tuple[int, str]:
    """Predict the peak as :func:`predict_peak` does, and say where in the round it is.

    Of the bytes saved in an offloaded round, the first are on the host. A window serves copies in flight and the last
    tensors; half of the excess that stays on the device is used, once it is free, for prefetching.
    """
    moments, kept_bytes = [], 0  # bytes saved until then, what else is alive, what is fetched, and where it is
    for call in step.calls:
        kept, working, _ = call.effect(decisions.get(call.layer, NOTHING))
        place = f"in the backward of {call.layer!r}"
        moments.append((call.base_live_bytes + kept_bytes, working, call.input_bytes, place))
        kept_bytes += kept
    total_bytes = step.base_total_bytes + kept_bytes
    moments.append((total_bytes, 0, 0, "at the end of the forward"))
    if not offloaded_bytes:
        return max((saved + working, place) for saved, working, _, place in moments)
    window_bytes = max(step.largest_bytes, -(-total_bytes // WINDOW_SHARE))
    ahead_bytes = -(-max(0, total_bytes - offloaded_bytes) // 2)
    peaks = []
    for saved_bytes, working_bytes, fetched_bytes, place in moments:
        left_bytes = max(saved_bytes - offloaded_bytes, min(saved_bytes, step.staying_bytes) + ahead_bytes)
        peaks.append((left_bytes + window_bytes + fetched_bytes + working_bytes, place))
    return max(peaks)


_HEADINGS = ("layers", "saved for backward", "each layer", "recomputed")


def format_table(step: StepProfile, plan: CheckpointPlan, budget_bytes: int) -> str:
    """Write the plan as text; one sentence where the budget changes nothing.

    Neighbours with equal cells share a line. Recomputation is a share of the layer's forward.
    """
    if plan.peak_bytes == plan.plain_peak_bytes and not plan.recompute_share and not plan.offloaded_bytes:
        sizes = f"{format_bytes(plan.peak_bytes)}, are within the budget of {format_bytes(budget_bytes)}"
        return f"All activations, {sizes}: nothing is recomputed."
    rows = [_HEADINGS, *_rows(step, plan.decisions)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = [
        f"{name:<{widths[0]}}  {saved:<{widths[1]}}  {size:>{widths[2]}}  {again:>{widths[3]}}".rstrip()
        for name, saved, size, again in rows
    ]
    rule = "-" * max(map(len, lines))
    part = plan.peak_bytes / max(1, budget_bytes)
    totals = {
        "budget": format_bytes(budget_bytes),
        "predicted peak": f"{format_bytes(plan.peak_bytes)} ({part:.1%} of the budget)",
        "baseline peak": format_bytes(plan.plain_peak_bytes),
        "minimum": format_bytes(plan.minimum_bytes),
        "offloaded": f"{format_bytes(plan.offloaded_bytes)} of each forward" if plan.offloaded_bytes else "",
        "extra compute": f"{_format_share(plan.recompute_share)} of the forward",
    }
    lines += [rule, *(f"{name:<14}  {text}" for name, text in totals.items() if text)]
    return "\n".join([lines[0], rule, *lines[1:]])


def _rows(step: StepProfile, decisions: Decisions) -> Iterator[tuple[str, str, str, str]]:
    entries = [(name, _cells(calls, decisions[name])) for name, calls in step.layers().items()]
    for cells, run in groupby(entries, key=itemgetter(1)):
        first, *others = [name for name, _ in run]
        last = others[-1].removeprefix(first.rpartition(".")[0] + ".") if others else ""
        yield f"{first} ... {last} ({1 + len(others)})" if others else first, *cells


def _cells(calls: list[CallProfile], decision: Decision) -> tuple[str, str, str]:
    kept_bytes = sum(call.effect(decision)[0] for call in calls)
    size = format_bytes(kept_bytes) if kept_bytes else ""
    if decision is None:
        return "all activations", size, "nothing"
    cost, whole = sum(call.effect(decision)[2] for call in calls), sum(call.cost for call in calls)
    again = _format_share(cost / whole) if cost else "nothing"
    names = Counter(op.name.removeprefix("aten.") for c in calls for i, op in enumerate(c.operators) if i in decision)
    listed = ", ".join((f"{count} x " if count > 1 else "") + name for name, count in sorted(names.items()))
    return f"outputs of {listed}" if listed else "inputs only", size, again


def _format_share(share: float) -> str:
    return "< 0.1%" if 0 < share < 0.0005 else f"{share:.1%}"


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
        away = 1 + bisect_left(range(1, away), 1, key=lambda size: predict_peak(step, decisions, size) <= budget_bytes)
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
            found = {name: decisions[pick] for name, (decisions, _), pick in zip(layers, options, picks, strict=True)}
            if predict_peak(step, found, offload_bytes) <= budget_bytes:
                best, low_bytes = found, limit_bytes
            else:
                high_bytes = limit_bytes
        if low_bytes == high_bytes:
            break
        limit_bytes = (low_bytes + high_bytes) // 2
    return best


def _find_options(calls: Sequence[CallProfile], step: StepProfile) -> tuple[list[Decision], "NDArray[np.int64]"]:
    """Return decisions for one layer, plain first, with a row for each: its cost, bytes it keeps, and those it needs.

    Both bytes that are kept and those of results that a plain layer does not save count against operators, by turns.
    """
    import numpy as np  # Lightning needs it; what is used without Lightning has no budget

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


def _search(stages: "Sequence[NDArray[np.int64]]", limit_bytes: int, max_states: int) -> Iterator[list[int]]:
    """Yield which row of each stage to pick, from the cheapest picks that fit to those that keep least."""
    import numpy as np

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
