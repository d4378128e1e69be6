"""The cheapest recomputation that keeps a step's activations within a byte budget.

Every layer is plain, or checkpointed with some outputs of its costly operators kept. Let ``K`` be what the calls before
call ``i`` keep. While the backward of ``i`` runs, the calls after it are gone and what it recomputes is there::

    base_live[i] + K + working_i(choice) <= budget      for every call
    base_total + (what all calls keep)   <= budget      at the end of the forward

Among the plans that hold to this, :func:`solve` gives the one that recomputes least, and of several such the one that
keeps least. It walks over the layers with all prefixes that no other beats in both kept bytes and cost, which is exact
since what follows sees of a prefix only its ``K``. A lower bound on what the rest must cost drops most of them: the
same problem where layers may be kept in part, which is convex and solved once from the last layer back.
Costs are compared as whole numbers, so equal costs are equal.

Limits. More than 512 prefixes at a layer, or 64 choices within one, are thinned to those with the best bounds (2048
and 128 where there are at most 16 layers). The plan still fits, and its ``least_recompute_cost`` says how much better
another could be. Measured at 0.15 to 0.9 of the plain peak: 100 transformer layers of 8 operators and 200 convolution
layers that all differ are proven best within a second; with 64 to 192 products of different sizes in each layer, as in
mixtures of experts, the bound stays within 1.7 % of the forward, after up to 15 seconds.

A layer with several calls is exact as long as no other layer is called between them. Else (two views through one
encoder) the search counts all it keeps from its first call on, and its later calls with what all layers keep, which is
too much, never too little; it then tries larger budgets and single changes, and takes what the exact prediction
(:func:`predict_peak`) lets through. Such a plan may miss the best; no single layer of it can be made cheaper.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate, pairwise
from math import inf
from typing import Any, NamedTuple

from lightning_vram.memory.units import MIB, format_bytes
from lightning_vram.techniques.checkpoint_plan import (
    CallProfile,
    CheckpointPlan,
    LayerChoice,
    LayerProfile,
    StepProfile,
)

_FIRST_WIDTH = 32  # prefixes of the quick search that gives the first upper bound
_WIDTHS = ((16, 64), (64, 512), (128, 2048))  # options in a layer and prefixes: more until the plan is proven best
_FEW_ROWS = 16  # layers up to which the last of them is tried
_ROUNDING = 1e-9  # of the forward's cost: what the bounds, which are floats, may be off
_BUDGETS_TRIED = 10  # where calls of layers interleave


class BudgetError(ValueError):
    """No choice fits the budget.

    Args:
        budget_bytes: What was asked for.
        minimum_bytes: The least budget that can be met.
        place: What runs when the minimum is reached.
    """

    def __init__(self, budget_bytes: int, minimum_bytes: int, place: str) -> None:
        super().__init__(
            f"budget={format_bytes(budget_bytes)} is below the minimum of {format_bytes(minimum_bytes)}, which is "
            f"reached {place} with every layer checkpointed. Give at least budget='{-(-minimum_bytes // MIB)}MiB', "
            "a smaller batch, or smaller layers."
        )
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes


def solve(profile: StepProfile, budget_bytes: int) -> CheckpointPlan:
    """Choose what every layer keeps so that the least is recomputed within a budget.

    Args:
        profile: What was observed in one round.
        budget_bytes: Limit of activation bytes at any time of the round.

    Returns:
        The plan. Its predicted peak is within the budget.

    Raises:
        BudgetError: If even full checkpointing of every layer does not fit.

    Example:
        >>> call = CallProfile(position=0, base_live_bytes=10, saved_bytes=100, cost=5.0)
        >>> profile = StepProfile((LayerProfile("net", (call,)),), base_total_bytes=20)
        >>> solve(profile, 119).choices[0].kind, solve(profile, 120).choices[0].kind
        ('checkpointed', 'plain')
    """
    minimum_bytes, place = _find_peak(profile, [layer.choose(frozenset()) for layer in profile.layers])
    if budget_bytes < minimum_bytes:
        raise BudgetError(budget_bytes, minimum_bytes, place)
    layers = sorted(profile.layers, key=lambda layer: layer.calls[0].position)
    scale = _find_scale(layers)
    found = _arrange(layers, profile.base_total_bytes, budget_bytes, scale).solve()
    choices = _choose(profile, layers, found.prefix.decisions())
    gap = found.gap / scale
    if _is_interleaved(layers):
        choices = _improve(profile, layers, choices, budget_bytes)
        gap = _cost_and_bytes(choices)[0] - _bound_interleaved(layers, profile.base_total_bytes, budget_bytes)
    elif predict_peak(profile, gathered := _gather(profile, layers, choices)) <= budget_bytes:
        choices = gathered
    return CheckpointPlan(
        profile=profile,
        choices=tuple(choices),
        budget_bytes=budget_bytes,
        peak_bytes=predict_peak(profile, choices),
        plain_peak_bytes=predict_peak(profile, [layer.choose(None) for layer in profile.layers]),
        minimum_bytes=minimum_bytes,
        least_recompute_cost=_cost_and_bytes(choices)[0] - max(0.0, gap),
    )


def predict_peak(profile: StepProfile, choices: Sequence[LayerChoice]) -> int:
    """Predict the peak of activation bytes of a round, exactly, however calls of layers interleave.

    Args:
        profile: What was observed.
        choices: One for each layer of the profile, in its order.

    Returns:
        Bytes at the end of the forward or in the backward of a call, whichever is more.

    Raises:
        ValueError: If the choices are for other layers.
    """
    return _find_peak(profile, choices)[0]


def _find_peak(profile: StepProfile, choices: Sequence[LayerChoice]) -> tuple[int, str]:
    if [choice.name for choice in choices] != [layer.name for layer in profile.layers]:
        raise ValueError("choices must be one for each layer of the profile, in its order.")
    decided = [(call, choice) for layer, choice in zip(profile.layers, choices, strict=True) for call in layer.calls]
    peak, place, kept_bytes = 0, "at the end of the forward", 0
    for call, choice in sorted(decided, key=lambda pair: pair[0].position):
        live_bytes = call.base_live_bytes + kept_bytes + call.working_bytes(choice.decision)
        if live_bytes > peak:
            peak, place = live_bytes, f"in the backward of {choice.name!r}"
        kept_bytes += call.kept_bytes(choice.decision)
    if profile.base_total_bytes + kept_bytes >= peak:
        peak, place = profile.base_total_bytes + kept_bytes, "at the end of the forward"
    return peak, place


# --- one layer: its operators, its options ---


class _Option(NamedTuple):
    """What a decision takes. ``need_bytes`` is for the hardest of its calls, above the base bytes of the first."""

    kept_bytes: int
    cost: int
    need_bytes: int
    kept: frozenset[int] | None


class _Group(NamedTuple):
    """Operators of a layer that are alike: of them only the number kept matters."""

    kept_bytes: int
    cost: int
    loads: tuple[int, ...]  # bytes that each adds while the backward of each call runs
    ordinals: tuple[int, ...]

    def saving(self, price: float) -> float:
        """What keeping one of them saves if a kept byte costs ``price``."""
        return self.cost - price * self.kept_bytes


class _Inside(NamedTuple):
    """A layer without its name and place: equal layers are equal here and share their options."""

    plain: _Option
    full_cost: int
    floors: tuple[int, ...]  # bytes while the backward of each call runs, nothing kept
    groups: tuple[_Group, ...]

    def option(self, kept_bytes: int, cost: int, loads: Iterable[int], ordinals: Iterable[int]) -> _Option:
        need_bytes = max(floor + load for floor, load in zip(self.floors, loads, strict=True))
        return _Option(kept_bytes, cost, need_bytes, frozenset(ordinals))


class _Row(NamedTuple):
    """A layer in its place."""

    base_bytes: int
    inside: _Inside


def _look_inside(layer: LayerProfile, calls: Sequence[CallProfile], scale: int) -> _Inside:
    """Put a layer in whole numbers.

    Args:
        layer: What was observed.
        calls: Those of its calls before which only layers before it are called. If these are not all, the others
            are bounded by what they save elsewhere; operators that are not saved are then not kept.
        scale: Makes costs whole numbers.
    """
    columns: list[tuple[int, ...]] = []  # for each operator what it adds to each call
    ordinals = range(max(len(call.operators) for call in layer.calls))
    for ordinal in ordinals:
        before = list(accumulate((_num_bytes(call, ordinal) for call in calls), initial=0))
        extra = [call.working_bytes(frozenset([ordinal])) - call.saved_bytes for call in calls]
        columns.append(tuple(map(sum, zip(before, extra, strict=False))))
    floors = [call.base_live_bytes - calls[0].base_live_bytes + call.saved_bytes for call in calls]
    counted = [c for c in range(len(calls)) if not _is_covered(c, floors, columns)]
    alike: defaultdict[tuple[int, int, tuple[int, ...]], list[int]] = defaultdict(list)
    for ordinal, column in zip(ordinals, columns, strict=True):
        found = [call.operators[ordinal] for call in layer.calls if ordinal < len(call.operators)]
        cost = sum(_whole(operator.cost, scale) for operator in found)
        if cost and (len(calls) == len(layer.calls) or all(operator.is_saved for operator in found)):
            loads = tuple(column[c] for c in counted)
            alike[sum(operator.num_bytes for operator in found), cost, loads].append(ordinal)
    saved_before = accumulate((call.saved_bytes for call in calls), initial=0)
    plain_need = max(floor + before for floor, before in zip(floors, saved_before, strict=False))
    groups = tuple(_Group(*key, tuple(ordinals)) for key, ordinals in alike.items())
    operators_cost = sum(group.cost * len(group.ordinals) for group in groups)
    return _Inside(
        plain=_Option(sum(call.saved_bytes for call in layer.calls), 0, plain_need, None),
        # the sum of rounded parts must not exceed a rounded whole
        full_cost=max(sum(_whole(call.cost, scale) for call in layer.calls), operators_cost),
        floors=tuple(floors[c] for c in counted),
        groups=groups,
    )


def _num_bytes(call: CallProfile, ordinal: int) -> int:
    return call.operators[ordinal].num_bytes if ordinal < len(call.operators) else 0


def _is_covered(call: int, floors: Sequence[int], columns: Sequence[tuple[int, ...]]) -> bool:
    """Whether the last call needs as much whatever is kept: so it is where all calls are alike."""
    last = len(floors) - 1
    return call != last and floors[call] <= floors[last] and all(column[call] <= column[last] for column in columns)


def _whole(cost: float, scale: int) -> int:
    return round(Fraction(cost) * scale)


def _find_scale(layers: Iterable[LayerProfile]) -> int:
    """Find what makes all costs whole numbers: floats are, times a power of two."""
    calls = [call for layer in layers for call in layer.calls]
    costs = [call.cost for call in calls] + [operator.cost for call in calls for operator in call.operators]
    return min(max((Fraction(cost).denominator for cost in costs), default=1), 2**64)


def _good_options(inside: _Inside, room_bytes: int) -> list[_Option]:
    """Keep the operators that save most for a byte, one after another: these options span the convex hull.

    Those that would not fit even alone are left out, except that the dearest is always there.
    """
    ranked = sorted(inside.groups, key=lambda g: g.cost / g.kept_bytes if g.kept_bytes else inf, reverse=True)
    options = [inside.plain]
    for groups in (ranked, [group for group in ranked if not any(group.loads)]):
        option = inside.option(0, inside.full_cost, [0] * len(inside.floors), ())
        options.append(option)
        loads = [0] * len(inside.floors)
        for group in groups:
            for ordinal in group.ordinals:
                loads = [load + more for load, more in zip(loads, group.loads, strict=True)]
                assert option.kept is not None
                kept_bytes, cost = option.kept_bytes + group.kept_bytes, option.cost - group.cost
                option = inside.option(kept_bytes, cost, loads, option.kept | {ordinal})
                options.append(option)
    return _undominated([option for option in options if option.need_bytes <= room_bytes])


def _undominated(options: Iterable[_Option]) -> list[_Option]:
    """Drop options that another beats or equals in kept bytes, cost and need. The first of equals stays."""
    best: list[_Option] = []
    cheapest: float = inf
    for option in sorted(options, key=lambda o: o[:3]):
        if option.cost < cheapest or not any(
            other.cost <= option.cost and other.need_bytes <= option.need_bytes for other in best
        ):
            best.append(option)
            cheapest = min(cheapest, option.cost)
    return best


def _find_options(
    inside: _Inside, price: float, least: float, allowed: float, max_options: int
) -> tuple[list[_Option], float]:
    """Find all options worth a look: not beaten, and within ``allowed`` of the best where a kept byte costs ``price``.

    Args:
        inside: The layer.
        price: Recomputation that a byte is worth to the other layers.
        least: Cost plus price of kept bytes of the best option.
        allowed: How much more an option may have.
        max_options: Go on with at most this many.

    Returns:
        Options, and how much more than ``least`` the best one has that was left out for lack of room; infinite if
        none was.
    """
    groups = sorted(inside.groups, key=lambda group: abs(group.saving(price)), reverse=True)
    may_save = sum(max(0.0, group.saving(price)) * len(group.ordinals) for group in groups)
    states: list[_State] = [_State(0, inside.full_cost, (0,) * len(inside.floors), ())]
    left_out = inf
    for group in groups:
        may_save -= max(0.0, group.saving(price)) * len(group.ordinals)
        grown = (state.keep(group, count) for state in states for count in range(len(group.ordinals) + 1))

        def excess(state: _State, rest: float = may_save) -> float:
            return state.cost + price * state.kept_bytes - rest - least

        states = _undominated_states([state for state in grown if excess(state) <= allowed])
        if len(states) > max_options:
            ranked = sorted(states, key=excess)
            left_out = min(left_out, excess(ranked[max_options]))
            states = ranked[:max_options]
    options = [inside.option(state.kept_bytes, state.cost, state.loads, state.ordinals) for state in states]
    return _undominated([inside.plain, *options]), left_out


class _State(NamedTuple):
    """A checkpointed layer of which some operators are decided."""

    kept_bytes: int
    cost: int
    loads: tuple[int, ...]
    ordinals: tuple[int, ...]

    def keep(self, group: _Group, count: int) -> "_State":
        return _State(
            self.kept_bytes + count * group.kept_bytes,
            self.cost - count * group.cost,
            tuple(load + count * more for load, more in zip(self.loads, group.loads, strict=True)),
            self.ordinals + group.ordinals[:count],
        )


def _undominated_states(states: Iterable[_State]) -> list[_State]:
    best: list[_State] = []
    cheapest: float = inf
    for state in sorted(states):
        if state.cost < cheapest or not any(_beats(other, state) for other in best):
            best.append(state)
            cheapest = min(cheapest, state.cost)
    return best


def _beats(one: _State, other: _State) -> bool:
    return one.cost <= other.cost and all(a <= b for a, b in zip(one.loads, other.loads, strict=True))


# --- all layers: the bound, the walk ---


class _Segment(NamedTuple):
    """Bytes that may be kept, and what keeping one of them saves."""

    slope: float
    num_bytes: int


class _Tail:
    """Lower bound on what the layers from some row on must cost, given what the layers before it keep.

    It is convex: every layer may mix its options. The bound is exact for mixed layers.

    Args:
        limit_bytes: The layers before must not keep more.
        segments: Cost by kept bytes, up to the limit, in order of their slopes.
        floor: Cost if nothing at all is kept before.
    """

    def __init__(self, limit_bytes: int, segments: list[_Segment], floor: float) -> None:
        self.limit_bytes = limit_bytes
        self.segments = segments
        self.floor = floor
        lengths = [segment.num_bytes for segment in segments]
        self._starts = list(accumulate(lengths, initial=limit_bytes - sum(lengths)))
        self._costs = list(accumulate((s.slope * s.num_bytes for s in segments), initial=floor))

    def bound(self, kept_bytes: int) -> float:
        """Lower bound of the cost if the layers before keep this much, at most the limit."""
        place = min(bisect_right(self._starts, kept_bytes), len(self.segments)) - 1
        if place < 0:
            return self.floor
        return self._costs[place] + self.segments[place].slope * max(0, kept_bytes - self._starts[place])

    def precede(self, hull: Sequence[_Option], room_bytes: int) -> "_Tail":
        """The bound one layer earlier.

        Args:
            hull: Convex hull of the layer's options.
            room_bytes: What the layers before may keep at most for it to run.
        """
        segments = self.with_layer(hull)
        limit_bytes = min(self.limit_bytes, room_bytes)
        cut = self.limit_bytes - limit_bytes
        while segments and cut:
            slope, num_bytes = segments.pop()
            if num_bytes > cut:
                segments.append(_Segment(slope, num_bytes - cut))
            cut -= min(cut, num_bytes)
        return _Tail(limit_bytes, segments, self.floor + hull[-1].cost)

    def with_layer(self, hull: Sequence[_Option]) -> list[_Segment]:
        """Segments of this and one more layer."""
        merged: list[_Segment] = []
        for segment in sorted(self.segments + _slopes(hull)):
            if merged and merged[-1].slope == segment.slope:
                segment = _Segment(segment.slope, segment.num_bytes + merged.pop().num_bytes)
            merged.append(segment)
        return merged


def _hull(options: Iterable[_Option]) -> list[_Option]:
    """The convex lower hull of cost by kept bytes, from the fewest bytes to the least cost."""
    hull: list[_Option] = []
    for option in sorted(options):
        if hull and option.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _is_above(middle: _Option, left: _Option, right: _Option) -> bool:
    across = (left.cost - right.cost) * (middle.kept_bytes - left.kept_bytes)
    return (left.cost - middle.cost) * (right.kept_bytes - left.kept_bytes) <= across


def _slopes(hull: Sequence[_Option]) -> list[_Segment]:
    return [
        _Segment((a.cost - b.cost) / (b.kept_bytes - a.kept_bytes), b.kept_bytes - a.kept_bytes)
        for a, b in pairwise(hull)
    ]


class _Prefix(NamedTuple):
    """Decisions for the first rows. Its first four fields order it, so no two compare further."""

    kept_bytes: int
    cost: int
    kept_before: int
    option_index: int
    option: _Option | None
    before: "_Prefix | None"

    def decisions(self) -> list[frozenset[int] | None]:
        """What was decided for each row."""
        found: list[frozenset[int] | None] = []
        prefix = self
        while prefix.before is not None and prefix.option is not None:
            found.append(prefix.option.kept)
            prefix = prefix.before
        return found[::-1]


class _Found(NamedTuple):
    """A plan, and how much cheaper another could be."""

    prefix: _Prefix
    gap: float


class _Problem:
    """Rows under a budget.

    Args:
        rows: Layers in order of their first calls.
        end_base_bytes: Base bytes beside all that is kept.
        budget_bytes: Limit.
    """

    def __init__(self, rows: Sequence[_Row], end_base_bytes: int, budget_bytes: int) -> None:
        self._rows = rows
        self._rooms = [budget_bytes - row.base_bytes for row in rows]
        self._good = [_good_options(row.inside, room) for row, room in zip(rows, self._rooms, strict=True)]
        self._hulls = [_hull(options) for options in self._good]
        self._tails = [_Tail(budget_bytes - end_base_bytes, [], 0.0)]
        for hull, room in zip(reversed(self._hulls), reversed(self._rooms), strict=True):
            # the first of a hull keeps the least and needs the least
            self._tails.insert(0, self._tails[0].precede(hull, room - hull[0].need_bytes))
        self._slack = _ROUNDING * sum(row.inside.full_cost for row in rows)

    @property
    def least_cost(self) -> float:
        """Lower bound of any plan's cost."""
        return max(0.0, self._tails[0].bound(0) - self._slack)

    def solve(self) -> _Found:
        """Find the cheapest plan: first a good one by a narrow walk, then all that may be better."""
        best, _ = self._walk(self._good, _FIRST_WIDTH, inf)
        assert best is not None  # keeping nothing fits, or the budget would be below the minimum
        gap = inf
        for max_options, width in _WIDTHS if len(self._rows) <= _FEW_ROWS else _WIDTHS[:-1]:
            options, left_out = self._find_all_options(best.cost, max_options)
            better, dropped = self._walk(options, width, best.cost + self._slack)
            if better is not None:
                best = min(best, better, key=lambda prefix: (prefix.cost, prefix.kept_bytes))
            gap = min(gap, best.cost - min(left_out, dropped))
            if gap <= self._slack:
                return _Found(best, 0.0)
        return _Found(best, gap)

    def _find_all_options(self, known_cost: int, max_options: int) -> tuple[list[list[_Option]], float]:
        """Find the options of every row that a plan no dearer than a known one may take.

        By Lagrange's bound: each row alone takes the option that is cheapest at a price of kept bytes. What an option
        is above that, the whole plan is above the bound.
        """
        prices = self._find_prices()
        cheapest = [
            min(option.cost + price * option.kept_bytes for option in hull)
            for hull, price in zip(self._hulls, prices, strict=True)
        ]
        limits = [tail.limit_bytes for tail in self._tails[1:]]
        paid = sum((a - b) * limit for (a, b), limit in zip(pairwise([*prices, 0.0]), limits, strict=True))
        bound = sum(cheapest) - paid
        allowed = known_cost - bound + max(self._slack, _ROUNDING * paid)
        found: dict[tuple[_Inside, float, float], tuple[list[_Option], float]] = {}
        options, left_out = [], inf
        for row, price, least in zip(self._rows, prices, cheapest, strict=True):
            key = (row.inside, price, least)
            if key not in found:
                found[key] = _find_options(row.inside, price, least, allowed, max_options)
            options.append(found[key][0])
            left_out = min(left_out, bound + found[key][1])
        return options, left_out

    def _find_prices(self) -> list[float]:
        """Follow the best plan of mixed options: for each row, what the last byte kept there saves."""
        prices: list[float] = []
        kept_bytes = 0
        price = inf
        for hull, tail in zip(self._hulls, self._tails[1:], strict=True):
            room = tail.limit_bytes - kept_bytes  # it goes to the segments that save most, wherever they are
            steepest = list(reversed(tail.with_layer(hull)))
            ends = accumulate(segment.num_bytes for segment in steepest)
            marginal = (s.slope for s, end in zip(steepest, ends, strict=True) if end >= room)
            price = min(price, next(marginal, 0.0))  # what is kept early is there for longer: prices never rise
            prices.append(price)
            slopes = _slopes(hull)
            above = sum(segment.num_bytes for segment in slopes if segment.slope > price)
            equal = sum(segment.num_bytes for segment in slopes if segment.slope == price)
            others = sum(segment.num_bytes for segment in tail.segments if segment.slope > price)
            kept_bytes += above + max(0, min(equal, room - above - others))
        return prices

    def _walk(self, options: Sequence[Sequence[_Option]], width: int, most_cost: float) -> tuple[_Prefix | None, float]:
        """Extend unbeaten prefixes row by row.

        Args:
            options: For each row.
            width: Go on with at most this many prefixes.
            most_cost: Drop what must cost more.

        Returns:
            The cheapest plan, and the lower bound of the cost of those that were dropped for the width.
        """
        prefixes, dropped = [_Prefix(0, 0, 0, 0, None, None)], inf
        for room, tail, choices in zip(self._rooms, self._tails[1:], options, strict=True):
            grown = _extend(prefixes, choices, room, tail.limit_bytes)
            bounded = [(prefix.cost + tail.bound(prefix.kept_bytes), prefix) for prefix in grown]
            bounded = [pair for pair in bounded if pair[0] <= most_cost]
            if len(bounded) > width:
                # The first keeps the least: whatever comes, it can go on.
                ranked = sorted(range(1, len(bounded)), key=lambda place: bounded[place][0])
                dropped = min(dropped, bounded[ranked[width - 1]][0])
                bounded = [bounded[place] for place in sorted([0, *ranked[: width - 1]])]
            prefixes = [prefix for _, prefix in bounded]
        return (prefixes[-1] if prefixes else None), dropped


def _extend(
    prefixes: Sequence[_Prefix], options: Sequence[_Option], room_bytes: int, limit_bytes: int
) -> list[_Prefix]:
    """Every prefix with every option that fits, by kept bytes, each cheaper than all that keep less."""
    before = [prefix.kept_bytes for prefix in prefixes]
    grown: list[tuple[Any, ...]] = []  # made a _Prefix only if it stays: few do
    for index, option in enumerate(options):
        more_bytes, more_cost = option.kept_bytes, option.cost
        fitting = bisect_right(before, min(room_bytes - option.need_bytes, limit_bytes - more_bytes))
        grown += [
            (prefix.kept_bytes + more_bytes, prefix.cost + more_cost, prefix.kept_bytes, index, option, prefix)
            for prefix in prefixes[:fitting]
        ]
    grown.sort()  # of equals the one that keeps late comes first, where what is kept is freed first
    cheapest = inf
    unbeaten = []
    for fields in grown:
        if fields[1] < cheapest:
            cheapest = fields[1]
            unbeaten.append(_Prefix._make(fields))
    return unbeaten


# --- layers whose calls interleave ---


def _arrange(layers: Sequence[LayerProfile], base_total_bytes: int, budget_bytes: int, scale: int) -> _Problem:
    """State the problem so that no plan that fits it is above the budget.

    A call that a later layer was called before is a late one. Where there is none, the problem is exact. A late call
    is held to what all layers keep altogether.
    """
    next_firsts: list[float] = [*(layer.calls[0].position for layer in layers[1:]), inf]
    rows, end_base_bytes = [], base_total_bytes
    for layer, next_first in zip(layers, next_firsts, strict=False):  # no layers, one infinity
        calls = [call for call in layer.calls if call.position < next_first]
        late = layer.calls[len(calls) :]
        end_base_bytes = max([end_base_bytes, *(call.base_live_bytes + call.saved_bytes for call in late)])
        inside = _look_inside(layer, calls, scale)
        rows.append(_Row(calls[0].base_live_bytes, inside))
    return _Problem(rows, end_base_bytes, budget_bytes)


def _choose(
    profile: StepProfile, layers: Sequence[LayerProfile], decisions: Sequence[frozenset[int] | None]
) -> list[LayerChoice]:
    """Bring decisions for layers in the order of their calls into the order of the profile."""
    by_name = {layer.name: decision for layer, decision in zip(layers, decisions, strict=True)}
    return [layer.choose(by_name[layer.name]) for layer in profile.layers]


def _gather(profile: StepProfile, layers: Sequence[LayerProfile], choices: Sequence[LayerChoice]) -> list[LayerChoice]:
    """Let equal layers exchange their decisions so that equal ones stand together, those that keep most last.

    Cost and kept bytes stay; the peak falls as a rule, since what is kept late is freed first.
    """
    decided = {choice.name: choice for choice in choices}
    alike: defaultdict[tuple[CallProfile, ...], list[str]] = defaultdict(list)
    for layer in layers:
        alike[tuple(replace(call, position=0, base_live_bytes=0) for call in layer.calls)].append(layer.name)
    exchanged: dict[str, frozenset[int] | None] = {}
    for names in alike.values():
        ranked = sorted((decided[name] for name in names), key=lambda c: (c.kept_bytes, c.kind, sorted(c.kept)))
        exchanged.update(zip(names, (choice.decision for choice in ranked), strict=True))
    return [layer.choose(exchanged[layer.name]) for layer in profile.layers]


def _cost_and_bytes(choices: Sequence[LayerChoice]) -> tuple[float, int]:
    """What a plan is judged by."""
    return sum(choice.recompute_cost for choice in choices), sum(choice.kept_bytes for choice in choices)


def _is_interleaved(layers: Sequence[LayerProfile]) -> bool:
    return any(one.calls[-1].position > other.calls[0].position for one, other in pairwise(layers))


def _improve(
    profile: StepProfile, layers: Sequence[LayerProfile], choices: list[LayerChoice], budget_bytes: int
) -> list[LayerChoice]:
    """Search with larger budgets for plans that are in truth within the real one, then improve single layers."""
    scale = _find_scale(layers)
    low, high = budget_bytes, budget_bytes + sum(call.saved_bytes for layer in layers for call in layer.calls)
    for _ in range(_BUDGETS_TRIED):
        middle = (low + high) // 2
        found = _arrange(layers, profile.base_total_bytes, middle, scale).solve()
        candidate = _choose(profile, layers, found.prefix.decisions())
        if predict_peak(profile, candidate) > budget_bytes:
            high = middle
        else:
            low = middle
            choices = min(choices, candidate, key=_cost_and_bytes)
    return _improve_single_layers(profile, choices, budget_bytes)


def _improve_single_layers(profile: StepProfile, choices: list[LayerChoice], budget_bytes: int) -> list[LayerChoice]:
    scale = _find_scale(profile.layers)
    options = [
        [layer.choose(o.kept) for o in _good_options(_look_inside(layer, layer.calls, scale), budget_bytes)]
        for layer in profile.layers
    ]
    is_improved = True
    while is_improved:
        is_improved = False
        for index, better in enumerate(options):
            for option in better:
                candidate = [*choices[:index], option, *choices[index + 1 :]]
                is_cheaper = _cost_and_bytes([option]) < _cost_and_bytes([choices[index]])
                if is_cheaper and predict_peak(profile, candidate) <= budget_bytes:
                    choices, is_improved = candidate, True
    return choices


def _bound_interleaved(layers: Sequence[LayerProfile], base_total_bytes: int, budget_bytes: int) -> float:
    """Lower bound of the cost that looks at the end of the forward only, where the order of calls does not matter."""
    scale = _find_scale(layers)
    rows = []
    for layer in layers:
        inside = _look_inside(layer, layer.calls, scale)
        groups = tuple(group._replace(loads=(0,)) for group in inside.groups)
        plain = inside.plain._replace(need_bytes=0)
        rows.append(_Row(0, inside._replace(plain=plain, floors=(0,), groups=groups)))
    return _Problem(rows, base_total_bytes, budget_bytes).least_cost / scale
