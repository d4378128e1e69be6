"""What layers save, as a mixed-integer linear program for HiGHS."""

import ctypes
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from tempfile import TemporaryFile
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_vram.techniques.activation_checkpointing.budget.peak import WINDOW_SHARE
from lightning_vram.techniques.activation_checkpointing.budget.plan import LayerProfile, StepProfile

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
        self._state_layers()
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

    def _state_layers(self) -> None:
        """A plain layer keeps no single results."""
        for column, _, groups in self._columns_of_layers():
            for group in groups:
                self._add_row({group.first_column: 1, column: len(group.ordinals)}, len(group.ordinals))

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
