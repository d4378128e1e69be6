"""Search for the cheapest choice for all layers: prefixes that no other beats, pruned by a lower bound.

What follows sees of a prefix only the bytes it keeps, so a prefix that keeps more and costs more is never needed.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import inf
from typing import Any, NamedTuple

from lightning_vram.techniques.activation_checkpointing.budget.bound import CostBound, find_hull, find_slopes
from lightning_vram.techniques.activation_checkpointing.budget.layer_options import (
    LayerInside,
    LayerOption,
    LayerRow,
    find_options,
    good_options,
)

_FIRST_WIDTH = 32  # prefixes of the quick search that gives the first upper bound
_WIDTHS = ((16, 64), (64, 512), (128, 2048))  # options in a layer and prefixes: more until the plan is proven best
_FEW_ROWS = 16  # layers up to which the last of them is tried
_ROUNDING = 1e-9  # of the forward's cost: what the bounds, which are floats, may be off


class _Prefix(NamedTuple):
    """Decisions for the first rows. Its first four fields order it, so no two compare further."""

    kept_bytes: int
    cost: int
    kept_before: int
    option_index: int
    option: LayerOption | None
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


class PlanSearch:
    """Rows under a budget.

    Args:
        rows: Layers in order of their first calls.
        end_base_bytes: Base bytes beside all that is kept.
        budget_bytes: Limit.
    """

    def __init__(self, rows: Sequence[LayerRow], end_base_bytes: int, budget_bytes: int) -> None:
        self._rows = rows
        self._rooms = [budget_bytes - row.base_bytes for row in rows]
        self._good = [good_options(row.inside, room) for row, room in zip(rows, self._rooms, strict=True)]
        self._hulls = [find_hull(options) for options in self._good]
        self._tails = [CostBound(budget_bytes - end_base_bytes, [], 0.0)]
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

    def _find_all_options(self, known_cost: int, max_options: int) -> tuple[list[list[LayerOption]], float]:
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
        found: dict[tuple[LayerInside, float, float], tuple[list[LayerOption], float]] = {}
        options, left_out = [], inf
        for row, price, least in zip(self._rows, prices, cheapest, strict=True):
            key = (row.inside, price, least)
            if key not in found:
                found[key] = find_options(row.inside, price, least, allowed, max_options)
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
            slopes = find_slopes(hull)
            above = sum(segment.num_bytes for segment in slopes if segment.slope > price)
            equal = sum(segment.num_bytes for segment in slopes if segment.slope == price)
            others = sum(segment.num_bytes for segment in tail.segments if segment.slope > price)
            kept_bytes += above + max(0, min(equal, room - above - others))
        return prices

    def _walk(
        self, options: Sequence[Sequence[LayerOption]], width: int, most_cost: float
    ) -> tuple[_Prefix | None, float]:
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
    prefixes: Sequence[_Prefix], options: Sequence[LayerOption], room_bytes: int, limit_bytes: int
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
