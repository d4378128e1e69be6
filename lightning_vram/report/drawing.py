"""What drawings share: the axis of bytes, files of pictures and pages, points with numbers."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Literal

from lightning_vram.memory.units import GIB, KIB, MIB, TIB
from lightning_vram.report.tables import wrap_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FAR = 2.5  # times what is needed: a limit beyond it would press the step to the ground
_NUM_TICKS = 7  # at most
NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class Scale:
    """From 0 to ``end_bytes``, in steps of ``tick_bytes``."""

    unit: str
    unit_bytes: int
    end_bytes: float
    tick_bytes: float
    has_limit: bool

    @property
    def ticks(self) -> tuple[float, ...]:
        """Marks in bytes, from 0."""
        return tuple(number * self.tick_bytes for number in range(int(self.end_bytes / self.tick_bytes) + 1))

    def label(self, num_bytes: float) -> str:
        """A mark's number in the unit."""
        return f"{num_bytes / self.unit_bytes:g}"


def choose_scale(needed_bytes: int, limit_bytes: int, headroom: float = 1.14) -> Scale:
    """Find the axis on which a step is large and its limit is seen, if both can be, with headroom for words above."""
    has_limit = limit_bytes <= _FAR * needed_bytes
    end_bytes = headroom * (max(needed_bytes, limit_bytes) if has_limit else needed_bytes)
    unit_bytes, unit = unit_of(end_bytes)
    return Scale(unit, unit_bytes, end_bytes, round_step(end_bytes / unit_bytes / _NUM_TICKS) * unit_bytes, has_limit)


def unit_of(num_bytes: float) -> tuple[int, str]:
    """Return the largest unit of bytes of which there is one, and its name."""
    units = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B"))
    return next(found for found in units if num_bytes >= found[0] or found[0] == 1)


def round_step(step: float) -> float:
    """The next of 1, 2, 5, 10, 20, ... (and their tenths)."""
    power = 1.0
    while power > step:
        power /= 10
    while power * 10 <= step:
        power *= 10
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= step)


PAGE = ".html"
INK, FAINT, GRID = "#24292f", "#6e7781", "#d0d7de"
GOOD, BAD = "#1a7f37", "#cf222e"
FONT: dict[Any, Any] = {"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 12}
_PICTURES = (".png", ".svg", ".pdf")
_DPI = 200  # 100 is enough to read it; twice that for screens that show it


def check_picture_path(path: Path, *, has_page: bool = False) -> None:
    """Refuse what no picture can be written to, before the work."""
    endings = (*_PICTURES, PAGE) if has_page else _PICTURES
    if path.suffix.lower() not in endings:
        raise ValueError(f"plot(path) must end in one of {', '.join(endings)}, got '{path}'.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"plot(path): there is no folder '{path.parent}'.")
    if path.is_dir():
        raise IsADirectoryError(f"plot(path): '{path}' is a folder.")
    if path.suffix.lower() in _PICTURES and find_spec("matplotlib") is None:
        way_out = f" A page ({path.stem}{PAGE}) needs nothing." if has_page else ""
        raise ModuleNotFoundError(f"a picture needs matplotlib: pip install matplotlib.{way_out}")


def write_plot(path: str | os.PathLike[str], page: Callable[[], str], draw: Callable[[], "Figure"]) -> None:
    """Write a page of HTML, or a picture, by the ending of the file; errors are those of the check above."""
    file = Path(path)
    check_picture_path(file, has_page=True)
    if file.suffix.lower() == PAGE:
        file.write_text(page(), encoding="utf-8")
    else:
        save_figure(draw(), file)


def style_axes(axes: "Axes", grid: Literal["both", "y"] = "both", color: str = FAINT) -> None:
    """Draw a faint grid instead of a frame and ticks; ``color`` is that of the lower edge."""
    axes.tick_params(length=0, colors=INK)
    axes.grid(axis=grid, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(color)


def save_figure(figure: "Figure", path: Path) -> None:
    """Write a picture into a file, in the format of its name; the same picture is the same file."""
    from matplotlib import rc_context  # an extra: not everybody has it

    # Without a date, and with names that are not drawn by chance.
    metadata = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(path.suffix.lower())
    with rc_context({"svg.hashsalt": "estimate"}):
        figure.savefig(path, dpi=_DPI, metadata=metadata)


WIDTHS = {"wide": 860, "narrow": 440}  # of a drawing, in pixels: its letters are as large on a small screen
LETTER = 8.4  # width, in pixels


def fill(template: str, **parts: str) -> str:
    """Return a template of this folder, filled with HTML."""
    # Split rather than replaced one after the other: what is put in is never read as the name of a part.
    texts = files(__package__).joinpath(template).read_text(encoding="utf-8").split("{{")
    filled = [parts[name] + rest for name, _, rest in (text.partition("}}") for text in texts[1:])]
    return "".join([texts[0], *filled])


def page(title: str, *, is_good: bool, lead: str, drawing: str, **parts: str) -> str:
    """Return a page; ``parts`` are HTML: ``side`` next to the drawing, ``tables``, ``notes`` and ``script`` below."""
    color = "good" if is_good else "bad"
    empty = {"side": "", "tables": "", "notes": "", "script": ""}
    return fill("page.html", title=escape(title), color=color, lead=escape(lead), drawing=drawing, **{**empty, **parts})


def drawings(height: int, name: str, draw: Callable[[int], Iterable[str]]) -> str:
    """Return a drawing twice, for wide and for small screens: the page shows one of them."""
    return "".join(
        f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(name)}">'
        f"{''.join(draw(width))}</svg>"
        for kind, width in WIDTHS.items()
    )


def table(name: str, lines: Iterable[tuple[str, ...]], colors: Iterable[str] = (), columns: Iterable[str] = ()) -> str:
    """Return a table of text; a single cell is as wide as the table. ``colors`` are of the first rows."""
    squares = [f'<u style="background:{color}"></u>' for color in colors]
    body = ""
    for number, line in enumerate(lines):
        cells, square = "</td><td>".join(map(escape, line)), squares[number] if number < len(squares) else ""
        body += f"<tr><td{' colspan=9' * (len(line) == 1)}>{square}{cells}</td></tr>"
    heads = "".join(f"<th>{escape(column)}</th>" for column in columns)
    first = f"<th>{escape(name)}</th>{heads}" if heads else f'<th colspan="9">{escape(name)}</th>'
    return f"<table><tr>{first}</tr>{body}</table>"


def rectangle(x: float, y: float, width: float, height: float, kind: str) -> str:
    """An element of SVG."""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def text_at(x: float, y: float, text: str, kind: str = "") -> str:
    """An element of SVG."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'


SIZE = 11.0  # of the numbers' letters, in points
MARK = 6.0  # half of a marker's side, in points
_GAP, _FARTHER, _MOST_TRIES = 2.0, 6.0, 60  # points, points, distances
_WIDTH, _HEIGHT = 0.68, 1.1  # of a letter, of its size
_SLOW, _FEWER = 5.0, 2.0
_LINE, _SPACE = 0.21, 0.13  # inches, of the list

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


def slowest_shown(times: Sequence[float]) -> float:
    """Return where an axis of times may end, so that one that is far slower than most does not squeeze all others."""
    first = min(times)
    slowest = max(time for time in times if time - first <= _SLOW * (median(times) - first))
    return slowest if first < slowest and max(times) - first > _FEWER * (slowest - first) else max(times)


def stairs(front: Sequence[Spot]) -> list[Spot]:
    """Return the corners of a Pareto front: as small as so far until the next is reached."""
    corners = list(front[:1])
    for (_, before), (time, size) in pairwise(front):
        corners += [(time, before), (time, size)]
    return corners


def place_labels(
    spots: Sequence[Spot], texts: Sequence[str], obstacles: Iterable[Box], frame: Box
) -> list[tuple[Spot, bool]]:
    """Return the middle of each label, close to its marker but on no other thing, and whether it needs a line to it."""
    lines, taken = list(obstacles), [box_around(spot, 2 * MARK, 2 * MARK) for spot in spots]
    found: dict[int, tuple[Spot, bool]] = {}
    # The long ones first: they fit in fewer places.
    for number in sorted(range(len(spots)), key=lambda number: -len(texts[number])):
        spot, text = spots[number], texts[number]
        width, height = len(text) * _WIDTH * SIZE, _HEIGHT * SIZE
        boxes = {place: box_around(place, width, height) for place in _around(spot, width, height)}
        places = [place for place, box in boxes.items() if _is_inside(box, frame)]
        free = [place for place in places if not _meets(boxes[place], taken)]
        clear = [place for place in free if not _meets(boxes[place], lines)]
        middle = (clear or free or places or [spot])[0]
        gap = max(abs(middle[0] - spot[0]) - width / 2, abs(middle[1] - spot[1]) - height / 2)
        found[number] = (middle, gap > MARK + _GAP + _FARTHER)
        taken.append(box_around(middle, width, height))
    return [found[number] for number in range(len(spots))]


def box_around(middle: Spot, width: float, height: float) -> Box:
    """A box by its middle."""
    return middle[0] - width / 2, middle[1] - height / 2, middle[0] + width / 2, middle[1] + height / 2


def lines_between(corners: Sequence[Spot]) -> list[Box]:
    """The horizontal and vertical lines through corners, as boxes."""
    return [(min(a, c), min(b, d), max(a, c), max(b, d)) for (a, b), (c, d) in pairwise(corners)]


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


def _around(spot: Spot, width: float, height: float) -> Iterable[Spot]:
    """Middles of a label around a marker, the nearest first, at its sides before its corners."""
    for number in range(_MOST_TRIES):
        gap = MARK + _GAP + number * _FARTHER
        for x, y in ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1)):
            near = 0.4 if x and y else 1.0  # at a corner
            yield spot[0] + x * (width / 2 + near * gap), spot[1] + y * (height / 2 + near * gap)


def _is_inside(box: Box, frame: Box) -> bool:
    return box[0] >= frame[0] and box[1] >= frame[1] and box[2] <= frame[2] and box[3] <= frame[3]


def _meets(box: Box, others: Iterable[Box]) -> bool:
    return any(box[0] < c and a < box[2] and box[1] < d and b < box[3] for a, b, c, d in others)
