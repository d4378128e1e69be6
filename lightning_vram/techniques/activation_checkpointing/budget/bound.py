"""Lower bound on what layers must recompute within the bytes that are left to them.

The same problem where layers may be kept in part: it is convex, and solved once from the last layer back.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from lightning_vram.techniques.activation_checkpointing.budget.layer_options import LayerOption


class _Segment(NamedTuple):
    """Bytes that may be kept, and what keeping one of them saves."""

    slope: float
    num_bytes: int


class CostBound:
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

    def precede(self, hull: Sequence[LayerOption], room_bytes: int) -> "CostBound":
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
        return CostBound(limit_bytes, segments, self.floor + hull[-1].cost)

    def with_layer(self, hull: Sequence[LayerOption]) -> list[_Segment]:
        """Segments of this and one more layer."""
        merged: list[_Segment] = []
        for segment in sorted(self.segments + find_slopes(hull)):
            if merged and merged[-1].slope == segment.slope:
                segment = _Segment(segment.slope, segment.num_bytes + merged.pop().num_bytes)
            merged.append(segment)
        return merged


def find_hull(options: Iterable[LayerOption]) -> list[LayerOption]:
    """The convex lower hull of cost by kept bytes, from the fewest bytes to the least cost."""
    hull: list[LayerOption] = []
    for option in sorted(options):
        if hull and option.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _is_above(hull[-1], hull[-2], option):
            hull.pop()
        hull.append(option)
    return hull


def _is_above(middle: LayerOption, left: LayerOption, right: LayerOption) -> bool:
    across = (left.cost - right.cost) * (middle.kept_bytes - left.kept_bytes)
    return (left.cost - middle.cost) * (right.kept_bytes - left.kept_bytes) <= across


def find_slopes(hull: Sequence[LayerOption]) -> list[_Segment]:
    """What lies between the options of a hull, steepest first."""
    return [
        _Segment((a.cost - b.cost) / (b.kept_bytes - a.kept_bytes), b.kept_bytes - a.kept_bytes)
        for a, b in pairwise(hull)
    ]
