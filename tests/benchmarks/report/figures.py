"""What pictures of benchmarks share: style, files, numbered points and the list of their names."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_vram.report.drawing import MARK, SIZE, Box, Spot, box_around, lines_between, place_labels
from lightning_vram.report.tables import wrap_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, GRID, BAD = "#24292f", "#6e7781", "#d0d7de", "#cf222e"
FONT: dict[Any, Any] = {"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 12}
_LINE, _SPACE = 0.21, 0.13  # inches, of the list


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
