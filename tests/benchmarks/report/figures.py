"""What pictures of benchmarks share: style, files, numbered points and the list of their names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_vram.report.tables import wrap_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, GRID, BAD = "#24292f", "#6e7781", "#d0d7de", "#cf222e"
FONT: dict[Any, Any] = {"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 12}
_LINE, _SPACE = 0.21, 0.13  # inches, of the list
SIZE = 11.0  # of the numbers' letters, in points
MARK = 6.0  # half of a marker's side, in points
_NEAR, _FARTHER, _MOST_TRIES = 2.0, 6.0, 60  # points, points, distances
_LETTER_WIDTH, _LETTER_HEIGHT = 0.68, 1.1  # of a letter, of its size

Spot = tuple[float, float]
Box = tuple[float, float, float, float]  # left, low, right, high


@dataclass(frozen=True)
class Entry:
    """A numbered point, and its text in the list."""

    spot: Spot  # of the marker, in data coordinates
    name: str
    details: str
    color: str
    is_bold: bool = False
    suffix: str = ""  # after the number


def style_axes(axes: "Axes") -> None:
    """Draw a faint grid instead of a frame and ticks."""
    axes.tick_params(length=0, colors=INK)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a picture into a file, in the format of its name; the same picture is the same file."""
    from matplotlib import rc_context  # an extra: not everybody has it

    # Without a date, and with names that are not drawn by chance.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    with rc_context({"svg.hashsalt": "estimate"}):
        figure.savefig(path, dpi=200, metadata=metadata)


def write_numbers(
    axes: "Axes", entries: Sequence[Entry], lines: Sequence[Sequence[Spot]], others: Sequence[Spot] = ()
) -> None:
    """Write the number of each entry next to its marker; the limits and size of ``axes`` are final."""
    points = 72 / axes.figure.dpi

    def to_points(spots: Sequence[Spot]) -> list[Spot]:
        return [(float(x) * points, float(y) * points) for x, y in map(axes.transData.transform, spots)]

    spots = to_points([entry.spot for entry in entries])
    texts = [f"{number}{entry.suffix}" for number, entry in enumerate(entries, start=1)]
    left, low, right, high = (edge * points for edge in axes.get_window_extent().extents)
    obstacles = [box for line in lines for box in lines_between(to_points(line))]
    obstacles += [box_around(spot, 2 * MARK, 2 * MARK) for spot in to_points(others)]
    places = place_labels(spots, texts, obstacles, (left, low, right, high))
    for entry, text, spot, (middle, is_far) in zip(entries, texts, spots, places, strict=True):
        style: dict[str, Any] = {"fontsize": SIZE, "fontweight": "bold", "color": entry.color, "zorder": 6}
        if is_far:
            line = {"arrowstyle": "-", "color": entry.color, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 5}
            style["arrowprops"] = line
        offset = (middle[0] - spot[0], middle[1] - spot[1])
        where: dict[str, Any] = {"xytext": offset, "textcoords": "offset points"}
        axes.annotate(text, entry.spot, ha="center", va="center_baseline", **where, **style)


def list_height(entries: Sequence[Entry], width: int) -> float:
    """What :func:`write_list` needs, in inches."""
    return sum((len(wrap_name(entry.name, width)) + 1) * _LINE + _SPACE for entry in entries)


def write_list(figure: "Figure", entries: Sequence[Entry], place: Box, width: int) -> None:
    """Write entries below each other, smaller if their place (inches) is too small; ``width`` is in characters."""
    left, low, _, y = place
    total_width, total_height = figure.get_size_inches()
    shrunk = min(1.0, (y - low) / list_height(entries, width))
    style: dict[str, Any] = {"va": "top", "fontsize": 10 * shrunk}

    def write(x: float, text: str, color: str, *, is_bold: bool) -> None:
        weight = "bold" if is_bold else "normal"
        figure.text(x / total_width, y / total_height, text, color=color, fontweight=weight, **style)

    for number, entry in enumerate(entries, start=1):
        write(left, str(number), entry.color, is_bold=True)
        for line in wrap_name(entry.name, width):
            write(left + 0.28, line, entry.color if entry.is_bold else INK, is_bold=entry.is_bold)
            y -= _LINE * shrunk
        write(left + 0.28, entry.details, FAINT, is_bold=False)
        y -= (_LINE + _SPACE) * shrunk


def place_labels(
    spots: Sequence[Spot], texts: Sequence[str], obstacles: Iterable[Box], frame: Box
) -> list[tuple[Spot, bool]]:
    """Return the middle of each label, close to its marker but on no other thing, and whether it needs a line to it."""
    lines, taken = list(obstacles), [box_around(spot, 2 * MARK, 2 * MARK) for spot in spots]
    found: dict[int, tuple[Spot, bool]] = {}
    # The long ones first: they fit in fewer places.
    for number in sorted(range(len(spots)), key=lambda number: -len(texts[number])):
        spot, text = spots[number], texts[number]
        width, height = len(text) * _LETTER_WIDTH * SIZE, _LETTER_HEIGHT * SIZE
        boxes = {place: box_around(place, width, height) for place in _around(spot, width, height)}
        places = [place for place, box in boxes.items() if _is_inside(box, frame)]
        free = [place for place in places if not _meets(boxes[place], taken)]
        clear = [place for place in free if not _meets(boxes[place], lines)]
        middle = (clear or free or places or [spot])[0]
        gap = max(abs(middle[0] - spot[0]) - width / 2, abs(middle[1] - spot[1]) - height / 2)
        found[number] = (middle, gap > MARK + _NEAR + _FARTHER)
        taken.append(box_around(middle, width, height))
    return [found[number] for number in range(len(spots))]


def box_around(middle: Spot, width: float, height: float) -> Box:
    """A box by its middle."""
    return middle[0] - width / 2, middle[1] - height / 2, middle[0] + width / 2, middle[1] + height / 2


def stairs(front: Sequence[Spot]) -> list[Spot]:
    """Return the corners of a Pareto front: as small as so far until the next is reached."""
    corners = list(front[:1])
    for (_, before), (time, size) in pairwise(front):
        corners += [(time, before), (time, size)]
    return corners


def lines_between(corners: Sequence[Spot]) -> list[Box]:
    """The horizontal and vertical lines through corners, as boxes."""
    return [(min(a, c), min(b, d), max(a, c), max(b, d)) for (a, b), (c, d) in pairwise(corners)]


def _around(spot: Spot, width: float, height: float) -> Iterable[Spot]:
    """Middles of a label around a marker, the nearest first, at its sides before its corners."""
    for number in range(_MOST_TRIES):
        gap = MARK + _NEAR + number * _FARTHER
        for x, y in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1)):
            near = 0.4 if x and y else 1.0  # at a corner
            yield spot[0] + x * (width / 2 + near * gap), spot[1] + y * (height / 2 + near * gap)


def _is_inside(box: Box, frame: Box) -> bool:
    return box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] and box[3] <= frame[3]


def _meets(box: Box, others: Iterable[Box]) -> bool:
    return any(box[0] < c and a < box[2] and box[1] < d and b < box[3] for a, b, c, d in others)
