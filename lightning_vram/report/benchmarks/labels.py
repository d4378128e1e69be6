"""Names beside the points of a picture, none over another: near their points, or in a list at the side."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.text import Annotation

_DISTANCES = (9.0, 16.0, 26.0, 38.0, 52.0, 70.0)  # of a name from its point, in points
_NEAR = 16.0  # up to which no line is needed
_NUM_DIRECTIONS = 16
_MARK = 7.0  # half of a mark's side, in points
_CROSSED = 30.0  # what crossing a line costs, in points of distance
_LONGEST = 56  # characters of a name in a list
_LINE = 1.3  # of the letters' size
_GAP = 1.5  # around a name

Box = tuple[float, float, float, float]  # left, bottom, right, top, in pixels
Spot = tuple[float, float]


@dataclass(frozen=True)
class Name:
    """What is written, and of which point.

    Args:
        text: May have several lines.
        xy: The point, as the axes count.
        color: Of the text.
    """

    text: str
    xy: Spot
    color: str


def place_names(
    axes: "Axes", names: Sequence[Name], marks: Sequence[Spot], lines: Sequence[tuple[Spot, Spot]], size: float
) -> bool:
    """Write each name near its point, with a line to it where it stands off.

    Args:
        axes: Whose limits and size do not change any more.
        names: What is written.
        marks: All points, as the axes count; no name covers one.
        lines: What names do not cross unless there is no other place, as the axes count.
        size: Of the letters, in points.

    Returns:
        Whether there was a place for all. Where not, nothing is written.
    """
    scale = axes.figure.dpi / 72
    transform = axes.transData.transform
    spots = [tuple(transform(mark)) for mark in marks]
    half = _MARK * scale
    squares: list[Box] = [(x - half, y - half, x + half, y + half) for x, y in spots]
    taken: list[Box] = []
    path = [(tuple(transform(start)), tuple(transform(end))) for start, end in lines]
    frame = axes.get_window_extent()
    room = (frame.x0, frame.y0, frame.x1, frame.y1)
    leaders: list[tuple[Spot, Spot]] = []
    written: list[Annotation] = []
    for name in sorted(names, key=lambda one: (-one.xy[1], one.xy[0])):
        text = axes.annotate(name.text, name.xy, color=name.color, fontsize=size, linespacing=1.05, zorder=6)
        extent = text.get_window_extent()
        text.remove()
        place = _best(
            tuple(transform(name.xy)), (extent.width, extent.height), scale, room, squares, taken, leaders, path
        )
        if place is None:
            for one in written:
                one.remove()
            return False
        box, leader, offset = place
        taken.append(box)
        if leader is not None:
            leaders.append(leader)
        written.append(_write(axes, name, size, offset, has_leader=leader is not None))
    return True


def list_names(axes: "Axes", names: Sequence[Name], size: float) -> None:
    """Write all names below each other to the right of the axes, in the order of their points, with lines to them.

    Args:
        axes: With room for the names beside it.
        names: What is written, each on one line.
        size: Of the letters, in points.
    """
    scale = axes.figure.dpi / 72
    frame, step = axes.get_window_extent(), _LINE * size * scale
    ordered = sorted(names, key=lambda one: (-one.xy[1], -one.xy[0]))
    heights = [float(axes.transData.transform(name.xy)[1]) for name in ordered]
    middles: list[float] = []
    for number, height in enumerate(
        heights
    ):  # as high as its point, but below the one before, and with room for the rest
        lowest = frame.y0 + step * (len(ordered) - number - 0.5)
        highest = middles[-1] - step if middles else frame.y1 - step / 2
        middles.append(min(max(height, lowest), highest))
    for name, middle in zip(ordered, middles, strict=True):
        place = axes.transAxes.inverted().transform((frame.x1 + _NEAR * scale, middle))
        axes.annotate(
            shorten(name.text, _LONGEST, placeholder="..."),
            name.xy,
            xytext=tuple(place),
            textcoords="axes fraction",
            va="center",
            color=name.color,
            fontsize=size,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": name.color,
                "linewidth": 0.7,
                "alpha": 0.5,
                "relpos": (0, 0.5),
                "shrinkA": 2,
                "shrinkB": 5,
            },
            zorder=3,
        )


def list_height(num_names: int, size: float) -> float:
    """What :func:`list_names` needs, in inches."""
    return num_names * _LINE * size / 72


def _write(axes: "Axes", name: Name, size: float, offset: Spot, *, has_leader: bool) -> "Annotation":
    arrow = {"arrowstyle": "-", "color": name.color, "linewidth": 0.7, "alpha": 0.7, "shrinkA": 1, "shrinkB": 5}
    return axes.annotate(
        name.text,
        name.xy,
        xytext=offset,
        textcoords="offset points",
        ha="center",
        va="center",
        color=name.color,
        fontsize=size,
        linespacing=1.05,
        arrowprops=arrow if has_leader else None,
        zorder=6,
    )


def _best(  # noqa: PLR0913
    spot: Spot,
    extent: Spot,
    scale: float,
    room: Box,
    marks: Sequence[Box],
    names: Sequence[Box],
    leaders: Sequence[tuple[Spot, Spot]],
    path: Sequence[tuple[Spot, Spot]],
) -> tuple[Box, tuple[Spot, Spot] | None, Spot] | None:
    """The cheapest free place: its box, its line to the point, and where its middle is from there, in points."""
    found: list[tuple[float, Box, tuple[Spot, Spot] | None, Spot]] = []
    for distance, (x, y) in _places(spot, extent, scale):
        half_width, half_height = extent[0] / 2 + _GAP, extent[1] / 2 + _GAP
        box = (x - half_width, y - half_height, x + half_width, y + half_height)
        leader = (spot, (x, y)) if distance > _NEAR else None  # drawn up to the name
        is_inside = box[0] >= room[0] and box[1] >= room[1] and box[2] <= room[2] and box[3] <= room[3]
        if not is_inside or any(_overlap(box, other) for other in (*marks, *names)):
            continue
        if any(_crosses(one, other, box) for one, other in leaders):
            continue
        others = [mark for mark in marks if not _holds(mark, spot)]
        if leader is not None and any(_crosses(*leader, other) for other in (*names, *others)):
            continue
        cost = distance + _CROSSED * any(_crosses(one, other, box) for one, other in path)
        found.append((cost, box, leader, ((x - spot[0]) / scale, (y - spot[1]) / scale)))
    return min(found, key=lambda one: one[0])[1:] if found else None


def _places(spot: Spot, extent: Spot, scale: float) -> Iterator[tuple[float, Spot]]:
    """Middles of a name around a point, such that its edge is at each distance, to the right first."""
    for distance in _DISTANCES:
        for number in range(_NUM_DIRECTIONS):
            angle = 2 * math.pi * number / _NUM_DIRECTIONS
            x, y = math.cos(angle), math.sin(angle)
            gap = distance * scale
            yield distance, (spot[0] + x * gap + _side(x) * extent[0] / 2, spot[1] + y * gap + _side(y) * extent[1] / 2)


def _side(cosine: float) -> float:
    """How far a box is pushed to a side: a name above a point has its middle there."""
    return max(-1.0, min(1.0, cosine * 1.6))


def _holds(box: Box, spot: Spot) -> bool:
    return box[0] <= spot[0] <= box[2] and box[1] <= spot[1] <= box[3]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _crosses(start: Spot, end: Spot, box: Box) -> bool:
    """Whether a straight line meets a box (Liang and Barsky)."""
    change = (end[0] - start[0], end[1] - start[1])
    enter, leave = 0.0, 1.0
    for axis in (0, 1):
        low, high = box[axis] - start[axis], box[axis + 2] - start[axis]
        if change[axis] == 0:
            if low > 0 or high < 0:
                return False
            continue
        first, second = sorted((low / change[axis], high / change[axis]))
        enter, leave = max(enter, first), min(leave, second)
    return enter <= leave
