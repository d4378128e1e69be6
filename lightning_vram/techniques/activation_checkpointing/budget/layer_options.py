"""One layer by itself: which of its results it may keep, what each choice takes and what it saves.

Operators that are alike are counted, not told apart; choices that another beats in everything are dropped.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from itertools import accumulate
from math import inf
from typing import NamedTuple

from lightning_vram.techniques.activation_checkpointing.budget.plan import CallProfile, LayerProfile


class LayerOption(NamedTuple):
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


class LayerInside(NamedTuple):
    """A layer without its name and place: equal layers are equal here and share their options."""

    plain: LayerOption
    full_cost: int
    floors: tuple[int, ...]  # bytes while the backward of each call runs, nothing kept
    groups: tuple[_Group, ...]

    def option(self, kept_bytes: int, cost: int, loads: Iterable[int], ordinals: Iterable[int]) -> LayerOption:
        """State what keeping these operators takes."""
        need_bytes = max(floor + load for floor, load in zip(self.floors, loads, strict=True))
        return LayerOption(kept_bytes, cost, need_bytes, frozenset(ordinals))


class LayerRow(NamedTuple):
    """A layer in its place."""

    base_bytes: int
    inside: LayerInside


def look_inside(layer: LayerProfile, calls: Sequence[CallProfile], scale: int) -> LayerInside:
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
    return LayerInside(
        plain=LayerOption(sum(call.saved_bytes for call in layer.calls), 0, plain_need, None),
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


def find_scale(layers: Iterable[LayerProfile]) -> int:
    """Find what makes all costs whole numbers: floats are, times a power of two."""
    calls = [call for layer in layers for call in layer.calls]
    costs = [call.cost for call in calls] + [operator.cost for call in calls for operator in call.operators]
    return min(max((Fraction(cost).denominator for cost in costs), default=1), 2**64)


def good_options(inside: LayerInside, room_bytes: int) -> list[LayerOption]:
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


def _undominated(options: Iterable[LayerOption]) -> list[LayerOption]:
    """Drop options that another beats or equals in kept bytes, cost and need. The first of equals stays."""
    best: list[LayerOption] = []
    cheapest: float = inf
    for option in sorted(options, key=lambda o: o[:3]):
        if option.cost < cheapest or not any(
            other.cost <= option.cost and other.need_bytes <= option.need_bytes for other in best
        ):
            best.append(option)
            cheapest = min(cheapest, option.cost)
    return best


def find_options(
    inside: LayerInside, price: float, least: float, allowed: float, max_options: int
) -> tuple[list[LayerOption], float]:
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
