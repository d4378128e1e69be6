"""What layers save, as a mixed-integer linear program for HiGHS."""

import ctypes
import os
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from tempfile import TemporaryFile
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_vram.memory.units import format_argument, format_bytes
from lightning_vram.techniques.activation_checkpointing.budget_plan import (
    WINDOW_SHARE,
    CallProfile,
    CheckpointPlan,
    LayerChoice,
    LayerProfile,
    StepProfile,
    find_peak,
    predict_peak,
)

__all__ = ["predict_peak"]

_SCALE = 2.0**10  # what the budget, and the cost of the forward, are to the solver
_MANY_COLUMNS = 2000  # from here on the best plan is not proven to the last
_GAP = 1e-3
_MOST_NODES = 200  # not seconds: all ranks, and all runs, are to get the same plan
_MOST_SECONDS = 60  # a last resort: the hardest that was tried, 200 layers of 64 different operators, takes 5
_DEBUG_LINE = b"HighsMipSolverData::"
_STDOUT, _STDOUT_LOCK = 1, Lock()  # a process has one


_Row = dict[int, float]  # number by column


class Found(NamedTuple):
    """What the solver found: for each layer the ordinals it keeps, ``None`` where it is plain.

    ``gap`` is how much less another plan could recompute.
    """

    decisions: list[frozenset[int] | None]
    gap: float


class _Group(NamedTuple):
    """Operators of one layer that are alike."""

    first_column: int
    ordinals: tuple[int, ...]
    cost: float
    kept_bytes: tuple[int, ...]  # by call
    working_bytes: tuple[int, ...]  # that each adds to the call's backward
    staying_bytes: tuple[int, ...]  # of the kept ones, those that cannot be offloaded


class KeepProgram:
    """Find the cheapest decisions for the layers of a profile within a budget.

    Columns: for each layer whether it is plain; for each group of its operators that are alike, how many are saved; and
    for each call what is saved up to its end. Bytes and costs are scaled, as the solver's tolerances are absolute
    (1e-6): they come to some bytes of a whole GPU.
    """

    def __init__(self, profile: StepProfile, budget_bytes: int, offload_bytes: int = 0) -> None:
        self._profile = profile
        self._groups: list[list[_Group]] = []
        self._layer_columns: list[int] = []
        self._num_choices = 0  # columns of whole numbers, which come first
        self._most: list[float] = []  # of each column
        for layer in profile.layers:
            self._groups.append(self._add_columns(layer))
        self._calls = sorted(
            ((call, row, place) for row, layer in enumerate(profile.layers) for place, call in enumerate(layer.calls)),
            key=lambda entry: entry[0].position,
        )
        self._unit = max(1, budget_bytes) / _SCALE
        self._entries: list[tuple[int, int, float]] = []  # row, column, number
        self._lower: list[float] = []
        self._upper: list[float] = []
        for column, _, groups in self._columns_of_layers():
            for group in groups:  # a plain layer keeps no single results
                self._add_row({group.first_column: 1, column: len(group.ordinals)}, len(group.ordinals))
        self._ends: _Row = {}  # adds up to what all calls keep
        if offload_bytes:
            self._state_offloaded_calls(budget_bytes, offload_bytes)
        else:
            self._state_calls(budget_bytes)

    def solve(self) -> Found | None:
        """Return the decisions that recompute least, and of such those that keep least; ``None`` if none fit.

        Where there are thousands of different operators, the gap is small instead of zero.
        """
        if not self._num_choices:
            return Found([], 0.0)
        costs, forward = self._find_costs()
        is_large = self._num_choices > _MANY_COLUMNS
        found = self._minimize(costs, is_large=is_large)
        if found.x is None:
            return None
        choices = self._round(found.x)
        if found.status != 0 or is_large:
            bound = found.mip_dual_bound if found.mip_dual_bound is not None else -_SCALE
            return Found(self._decide(choices), max(0.0, float(costs @ choices - bound)) * forward / _SCALE)
        kept = np.zeros_like(costs)
        kept[list(self._ends)] = 1.0
        as_cheap = self._minimize(kept, (costs, float(costs @ choices)))
        return Found(self._decide(choices if as_cheap.x is None else self._round(as_cheap.x)), 0.0)

    def _add_columns(self, layer: LayerProfile) -> list[_Group]:
        """One column for the layer, whose number is that before its first group, and one for each group."""
        self._layer_columns.append(len(self._most))
        self._most.append(1.0)
        groups = []
        for key, ordinals in _find_alike(layer).items():
            groups.append(_Group(len(self._most), tuple(ordinals), *key))
            self._most.append(len(ordinals))
        self._num_choices = len(self._most)
        return groups

    def _columns_of_layers(self) -> Iterator[tuple[int, LayerProfile, list[_Group]]]:
        yield from zip(self._layer_columns, self._profile.layers, self._groups, strict=True)

    def _state_calls(self, budget_bytes: int) -> None:
        """What was kept before each call and what its backward needs fits, and all that is kept by the end fits."""
        before: _Row = {}
        for call, row, place in self._calls:
            working = self._of_groups(row, [group.working_bytes[place] for group in self._groups[row]])
            self._add_row(before | working, self._scale(budget_bytes - call.base_live_bytes - call.saved_bytes))
            kept = self._of_groups(row, [group.kept_bytes[place] for group in self._groups[row]], call.saved_bytes)
            before = self._add_sum(before | kept)
        self._add_row(before, self._scale(budget_bytes - self._profile.base_total_bytes))
        self._ends = before

    def _state_offloaded_calls(self, budget_bytes: int, offload_bytes: int) -> None:
        """The same where the first bytes that travel are away, as ``Traffic`` counts it."""
        profile, moving, staying = self._profile, _Row(), _Row()
        window, excess = ({self._add_column(): 1.0} for _ in range(2))
        for call, row, place in self._calls:
            working = self._of_groups(row, [group.working_bytes[place] for group in self._groups[row]])
            left = {self._add_column(): 1.0}
            fixed = call.staying_base_bytes + call.old_input_bytes + call.saved_bytes
            self._add_row(staying | working | window | left, self._scale(budget_bytes - fixed))
            base = call.base_live_bytes - call.staying_base_bytes
            self._add_row(moving | _negative(left), self._scale(offload_bytes - base))
            self._add_row(_times(excess, 0.5) | _negative(left), self._scale(-call.new_input_bytes))
            stays = self._of_groups(row, [g.staying_bytes[place] for g in self._groups[row]], call.staying_saved_bytes)
            moves = self._of_groups(
                row,
                [group.kept_bytes[place] - group.staying_bytes[place] for group in self._groups[row]],
                call.saved_bytes - call.staying_saved_bytes,
            )
            moving, staying = self._add_sum(moving | moves), self._add_sum(staying | stays)
        base = profile.base_total_bytes - profile.staying_base_bytes
        self._add_row(moving | _negative(excess), self._scale(offload_bytes - base))
        self._add_row(_times(moving, 1 / WINDOW_SHARE) | _negative(window), self._scale(-base / WINDOW_SHARE))
        self._add_row(_negative(window), self._scale(-profile.largest_bytes))
        self._add_row(staying | window | excess, self._scale(budget_bytes - profile.staying_base_bytes))
        self._ends = moving | staying

    def _of_groups(self, row: int, num_bytes: Sequence[int], plain_bytes: int = 0) -> _Row:
        """A number for each group of one layer, and for the layer itself."""
        found = {g.first_column: self._scale(size) for g, size in zip(self._groups[row], num_bytes, strict=True)}
        return found | {self._layer_columns[row]: self._scale(plain_bytes)}

    def _add_sum(self, numbers: _Row) -> _Row:
        """Return a new column that equals a sum."""
        column = {self._add_column(): 1.0}
        self._add_row(numbers | _negative(column), 0.0, 0.0)
        return column

    def _add_column(self) -> int:
        self._most.append(np.inf)
        return len(self._most) - 1

    def _scale(self, num_bytes: float) -> float:
        return num_bytes / self._unit

    def _add_row(self, numbers: _Row, upper: float, lower: float = -np.inf) -> None:
        self._entries += [(len(self._upper), column, number) for column, number in numbers.items() if number]
        self._lower.append(lower)
        self._upper.append(upper)

    def _find_costs(self) -> tuple[NDArray[np.float64], float]:
        """What each column saves, as a negative cost of the forward's scale, and what the forward of layers costs."""
        costs = np.zeros(len(self._most))
        for column, layer, groups in self._columns_of_layers():
            costs[column] = -max(layer.cost, sum(group.cost * len(group.ordinals) for group in groups))
            for group in groups:
                costs[group.first_column] = -group.cost
        forward = sum(layer.cost for layer in self._profile.layers) or 1.0
        return costs / forward * _SCALE, forward

    def _minimize(
        self,
        weights: NDArray[np.float64],
        limit: tuple[NDArray[np.float64], float] | None = None,
        *,
        is_large: bool = False,
    ) -> Any:
        from scipy import optimize, sparse  # a third of a second, for those who plan only

        rows, columns, numbers = zip(*self._entries, strict=True) if self._entries else ((), (), ())
        shape = (len(self._upper), len(self._most))
        matrix = sparse.csr_array((numbers, (rows, columns)), shape=shape)
        constraints = [optimize.LinearConstraint(matrix, self._lower, self._upper)]
        if limit is not None:
            constraints.append(optimize.LinearConstraint(limit[0][None], -np.inf, limit[1]))
        integrality = np.arange(len(self._most)) < self._num_choices
        gap = _GAP if is_large else 0.0  # presolve fills the matrix: in thousands of columns that takes too long
        options = {"node_limit": _MOST_NODES, "time_limit": _MOST_SECONDS, "mip_rel_gap": gap, "presolve": not is_large}
        bounds = optimize.Bounds(0, self._most)
        how = {"integrality": integrality, "bounds": bounds, "constraints": constraints, "options": options}
        with _without_debug_lines():
            return optimize.milp(weights, **how)

    def _round(self, solution: NDArray[np.float64]) -> NDArray[np.float64]:
        rounded = np.round(solution)
        rounded[self._num_choices :] = 0
        return rounded

    def _decide(self, choices: Sequence[float] | NDArray[np.float64]) -> list[frozenset[int] | None]:
        return [
            None
            if choices[column]
            else frozenset(ordinal for g in groups for ordinal in g.ordinals[: int(choices[g.first_column])])
            for column, _, groups in self._columns_of_layers()
        ]


@contextmanager
def _without_debug_lines() -> Iterator[None]:
    """Drop lines that HiGHS prints where it repairs a solution. What other threads print appears afterwards.

    HiGHS 1.12, of scipy 1.17, prints them whatever its options: https://github.com/ERGO-Code/HiGHS/issues/2783.
    """
    flush = ctypes.CDLL(None).fflush  # HiGHS prints into the buffer of the C library
    with _STDOUT_LOCK, TemporaryFile() as printed:
        flush(None)
        stdout = os.dup(_STDOUT)
        os.dup2(printed.fileno(), _STDOUT)
        try:
            yield
        finally:
            flush(None)
            os.dup2(stdout, _STDOUT)
            os.close(stdout)
            printed.seek(0)
            with suppress(OSError), open(_STDOUT, "wb", closefd=False) as file:  # nobody may read it any more
                file.writelines(line for line in printed if not line.startswith(_DEBUG_LINE))


def _negative(row: _Row) -> _Row:
    return _times(row, -1.0)


def _times(row: _Row, factor: float) -> _Row:
    return {column: number * factor for column, number in row.items()}


_Key = tuple[float, tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _find_alike(layer: LayerProfile) -> dict[_Key, list[int]]:
    """Ordinals of the operators that save something, by what they cost, keep and add to each call."""
    alike: defaultdict[_Key, list[int]] = defaultdict(list)
    for ordinal in range(max(len(call.operators) for call in layer.calls)):
        one = frozenset([ordinal])
        cost = sum(call.operators[ordinal].cost for call in layer.calls if ordinal < len(call.operators))
        kept = tuple(call.kept_bytes(one) for call in layer.calls)
        working = tuple(call.working_bytes(one) - call.saved_bytes for call in layer.calls)
        staying = tuple(call.staying_bytes(one) for call in layer.calls)
        if cost:
            alike[cost, kept, working, staying].append(ordinal)
    return alike


# Every layer is plain, or checkpointed with some outputs of its costly operators kept. Let ``K`` be what the calls
# before call ``i`` keep. While the backward of ``i`` runs, the calls after it are gone and what it recomputes is
# there::
#
# base_live[i] + K + working_i(choice) <= budget      for every call
# base_total + (what all calls keep)   <= budget      at the end of the forward
#
# Among the plans that hold to this, :func:`solve` gives the one that recomputes least, and of several such the one that
# keeps least. All of it is linear in choices of 0 or 1, so HiGHS (``scipy.optimize.milp``) solves it exactly. With
# ``offload_bytes`` the ``live_bytes`` of ``Traffic`` take the place of ``base_live + K``.
#
# Limits. A plan within some millionths of the budget may be passed over for the next best. Proofs end after 200 nodes,
# and from 2000 choices on a plan may recompute up to a thousandth of the forward more than the best: then
# ``least_recompute_cost`` is below the plan's. Measured on one core at 0.15 to 0.9 of the plain peak: 12 to 100 equal
# transformer layers of 8 operators take 0.02 to 0.5 s, 200 convolution layers that all differ 0.1 to 0.7 s, 200 layers
# with 64 products of different sizes, as in mixtures of experts, 0.4 to 5 s; offloading takes as long once more.

_LEAST_STEP = 1e-9  # of the budget: HiGHS may be above it by up to a millionth


class BudgetError(ValueError):
    """No choice fits the budget."""

    def __init__(self, budget_bytes: int, minimum_bytes: int, place: str) -> None:
        super().__init__(
            f"budget={format_bytes(budget_bytes)} is below the minimum of {format_bytes(minimum_bytes)}, which is "
            f"reached {place} with every layer checkpointed. Give at least "
            f"budget='{format_argument(minimum_bytes, round_up=True)}', a smaller batch, or smaller layers."
        )
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes


def solve(profile: StepProfile, budget_bytes: int, offload_bytes: int = 0) -> CheckpointPlan:
    """Choose what every layer keeps so that the least is recomputed within a budget of activation bytes at any time.

    At most ``offload_bytes`` travel to the host: nothing is recomputed that they make room for, and no more of them
    travel than are needed. ``BudgetError`` says that even full checkpointing of every layer does not fit.

    Example:
        >>> from lightning_vram.techniques.activation_checkpointing.budget_plan import LayerProfile
        >>> call = CallProfile(position=0, base_live_bytes=10, saved_bytes=100, cost=5.0)
        >>> profile = StepProfile((LayerProfile("net", (call,)),), base_total_bytes=20)
        >>> solve(profile, 119).choices[0].kind, solve(profile, 120).choices[0].kind
        ('checkpointed', 'plain')
    """
    nothing = [layer.choose(frozenset()) for layer in profile.layers]
    minimum_bytes, place = min(find_peak(profile, nothing, num_bytes) for num_bytes in {0, offload_bytes})
    if budget_bytes < minimum_bytes:
        raise BudgetError(budget_bytes, minimum_bytes, place)
    offloaded_bytes = 0
    choices, least_cost = _choose(profile, budget_bytes, 0)
    if offload_bytes and (_cost(choices) > 0 or predict_peak(profile, choices) > budget_bytes):
        others, least_of_others = _choose(profile, budget_bytes, offload_bytes)
        fits = predict_peak(profile, others, offload_bytes) <= budget_bytes
        if fits and (_cost(others) < _cost(choices) or predict_peak(profile, choices) > budget_bytes):
            choices, offloaded_bytes = others, _find_least_offload(profile, others, budget_bytes, offload_bytes)
        least_cost = min(least_cost, least_of_others)
    return CheckpointPlan(
        profile=profile,
        choices=tuple(choices),
        budget_bytes=budget_bytes,
        peak_bytes=predict_peak(profile, choices, offloaded_bytes),
        plain_peak_bytes=predict_peak(profile, [layer.choose(None) for layer in profile.layers]),
        minimum_bytes=minimum_bytes,
        least_recompute_cost=min(least_cost, _cost(choices)),
        offloaded_bytes=offloaded_bytes,
    )


def _choose(profile: StepProfile, budget_bytes: int, offload_bytes: int) -> tuple[list[LayerChoice], float]:
    """Return the choices, and what any within the budget recompute at least."""
    limit_bytes, less_bytes = budget_bytes, max(1, round(_LEAST_STEP * budget_bytes))
    least_cost: float | None = None
    while (found := KeepProgram(profile, limit_bytes, offload_bytes).solve()) is not None:
        choices = _decide(profile, found.decisions)
        if least_cost is None:
            least_cost = max(0.0, _cost(choices) - found.gap)
        if predict_peak(profile, choices, offload_bytes) <= budget_bytes:
            gathered = _gather(profile, choices)
            is_better = predict_peak(profile, gathered, offload_bytes) <= budget_bytes
            return (gathered if is_better else choices), least_cost
        limit_bytes, less_bytes = budget_bytes - less_bytes, 4 * less_bytes
    nothing = [layer.choose(frozenset()) for layer in profile.layers]
    return nothing, _cost(nothing) if least_cost is None else least_cost


def _find_least_offload(
    profile: StepProfile, choices: Sequence[LayerChoice], budget_bytes: int, offload_bytes: int
) -> int:
    """Return the fewest bytes that have to be away: the fewer stay, the lower is the peak."""
    sizes = range(1, offload_bytes)
    return 1 + bisect_left(sizes, 1, key=lambda size: predict_peak(profile, choices, size) <= budget_bytes)


def _cost(choices: Iterable[LayerChoice]) -> float:
    return sum(choice.recompute_cost for choice in choices)


def _decide(profile: StepProfile, decisions: Iterable[frozenset[int] | None]) -> list[LayerChoice]:
    return [layer.choose(decision) for layer, decision in zip(profile.layers, decisions, strict=True)]


def _gather(profile: StepProfile, choices: Sequence[LayerChoice]) -> list[LayerChoice]:
    """Let equal layers exchange their decisions so that equal ones stand together, those that keep most last.

    Cost and kept bytes stay; the peak falls as a rule, since what is kept late is freed first.
    """
    decided = {choice.name: choice for choice in choices}
    alike: defaultdict[tuple[CallProfile, ...], list[str]] = defaultdict(list)
    for layer in sorted(profile.layers, key=lambda layer: layer.calls[0].position):
        calls = (replace(call, position=0, base_live_bytes=0, staying_base_bytes=0) for call in layer.calls)
        alike[tuple(calls)].append(layer.name)
    exchanged: dict[str, frozenset[int] | None] = {}
    for names in alike.values():
        ranked = sorted((decided[name] for name in names), key=lambda c: (c.kept_bytes, c.kind, sorted(c.kept)))
        exchanged.update(zip(names, (choice.decision for choice in ranked), strict=True))
    return _decide(profile, (exchanged[layer.name] for layer in profile.layers))
