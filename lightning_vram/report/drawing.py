"""Pictures: drawn once, as SVG, which a page of HTML shows and matplotlib converts into other formats."""

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from string import Template
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from lightning_vram.memory.units import GIB, KIB, MIB, TIB
from lightning_vram.report.tables import Rows, wrap_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def unit_of(num_bytes: float) -> tuple[int, str]:
    """Return the largest unit of bytes of which there is one, and its name."""
    units = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"), (1, "B"))
    return next(found for found in units if num_bytes >= found[0] or found[0] == 1)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Return round numbers for an axis, in steps of 1, 2, 5, 10, 20, ... (and their tenths)."""
    least = (high - low) / most
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= least)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


WIDTH = 860  # of a drawing, in pixels
LETTER = 8.4  # width, in pixels
_WIDTH, _ABOVE, _GAP, _MARGIN = 1240, 64, 24, 18  # of a picture, in pixels: a drawing with its title and tables
_LINE, _LETTERS = 23, 36  # of a table in a picture: pixels, characters of a line
_SPACE, _COLUMN = 8, 56  # pixels: between two columns of a table, and the least width of one
_LONG_TITLE, _NOTE = 85, 135  # characters
_CONVERTED = (".png", ".pdf")
_ENDINGS = (".png", ".svg", ".pdf", ".html")


def check_picture_path(path: Path) -> None:
    """Refuse what no picture can be written to, before the work."""
    ending = path.suffix.lower()
    if ending not in _ENDINGS:
        raise ValueError(f"plot(path) must end in one of {', '.join(_ENDINGS)}, got '{path}'.")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"plot(path): there is no folder '{path.parent}'.")
    if path.is_dir():
        raise IsADirectoryError(f"plot(path): '{path}' is a folder.")
    if ending in _CONVERTED and find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            f"{path.name} needs matplotlib: pip install matplotlib. {path.stem}.svg and {path.stem}.html need nothing."
        )


def _draw_rows(rows: Rows, left: float, y: float, right: float) -> tuple[str, float]:
    """Return the elements of a table, and where the next one begins."""
    numbers = [cells for cells in (rows.columns, *(line[1:] for line in rows.lines)) if cells]
    widths = [max(_COLUMN, _SPACE + LETTER * max(map(len, column))) for column in zip(*numbers, strict=True)]
    ends = [right - sum(widths[number + 1 :]) for number in range(len(widths))]

    def draw(cells: Sequence[str], kind: str) -> str:
        return "".join(text_at(end, y, cell, kind) for end, cell in zip(ends, cells, strict=False))

    drawn = text_at(left, y, rows.name, "strong") + draw(rows.columns, "end small")
    for number, (first, *others) in enumerate(rows.lines):
        indent = 0
        if number < len(rows.colors):
            indent = 22
            drawn += f'<rect x="{left}" y="{y + _LINE - 12}" width="14" height="14" fill="{rows.colors[number]}"/>'
        for words in wrap_name(first, _LETTERS):
            y += _LINE
            drawn += text_at(left + indent, y, words, "" if others else "strong")
        if others and len("".join((first, *others))) > _LETTERS:
            y += _LINE  # numbers stand below a name that leaves them no room
        drawn += draw(others, "end small faint")
    return drawn, y + 2 * _LINE


@dataclass(frozen=True)
class Picture:
    """A drawing with its title and tables. Texts are plain; ``script`` is HTML."""

    title: str
    lead: str  # a sentence below the title of a page
    name: str  # of what is drawn, for those who do not see it
    height: int  # of the drawing, in pixels
    drawing: str  # elements of SVG
    side: Sequence[Rows]  # next to the drawing
    is_good: bool | None = None  # None: no judgement
    tables: Sequence[Rows] = ()  # below, in a page
    notes: Sequence[str] = ()
    script: str = ""

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write a page or a picture, by the ending of the file; the same picture is the same file."""
        file = Path(path)
        check_picture_path(file)
        ending = file.suffix.lower()
        if ending in _CONVERTED:
            metadata = {"CreationDate": None} if ending == ".pdf" else None
            # 100 points per inch are enough to read it; twice that for screens that show them
            as_figure(self.svg()).savefig(file, dpi=200, metadata=metadata)
        else:
            file.write_text(self.page() if ending == ".html" else self.svg(), encoding="utf-8")

    def page(self) -> str:
        """Return a page of HTML, which needs nothing else."""
        head = f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(self.name)}">'
        return fill(
            "page.html",
            style=_read("drawing.css"),
            title=escape(self.title),
            color=self._color,
            lead=escape(self.lead),
            drawing=f"{head}{self.drawing}</svg>",
            side="".join(rows.html() for rows in self.side),
            tables="".join(rows.html() for rows in self.tables),
            notes="".join(f"<p>Note: {escape(note)}</p>" for note in self.notes),
            script=self.script,
        )

    def svg(self) -> str:
        """Return a picture that needs nothing else, in light colors."""
        left, y, tables = WIDTH + _GAP, _ABOVE + 6.0, ""
        for rows in self.side:
            drawn, y = _draw_rows(rows, left, y, _WIDTH - _MARGIN)
            tables += drawn
        lines = [line for note in self.notes for line in wrap_name(note, _NOTE)]
        height = max(_ABOVE + self.height, int(y)) + _LINE * len(lines)
        notes = (text_at(_GAP, height - _LINE * n - 8, line, "faint") for n, line in enumerate(lines[::-1]))
        title = f"{'long' if len(self.title) > _LONG_TITLE else 'title'} strong {self._color}"
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'font-family="DejaVu Sans, Verdana, sans-serif"><style>{_read("drawing.css")}</style>'
            f"{rectangle(0, 0, _WIDTH, height, 'paper')}{text_at(_GAP, 36, self.title, title)}"
            f'<g transform="translate(0 {_ABOVE})">{self.drawing}</g>'
            f"{tables}{''.join(notes)}</svg>"
        )

    @property
    def _color(self) -> str:
        return "" if self.is_good is None else "good" if self.is_good else "bad"


def fill(template: str, **parts: str) -> str:
    """Return a template of this folder, filled with HTML."""
    return Template(_read(template)).substitute(parts)


@cache
def _read(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def rectangle(x: float, y: float, width: float, height: float, kind: str) -> str:
    """An element of SVG."""
    return f'<rect class="{kind}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def text_at(x: float, y: float, text: str, kind: str = "") -> str:
    """An element of SVG."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}">{escape(text)}</text>'


_RULE = re.compile(r"^(\w*)((?:\.\w+)*) \{ (.*) \}$", re.MULTILINE)  # of drawing.css
_INCH, _POINT = 100, 0.72  # pixels, of a pixel


def as_figure(svg: str) -> "Figure":
    """Convert a :class:`Picture` for matplotlib. Knows only the elements that pictures of this package are made of."""
    from matplotlib import rc_context  # an extra: not everybody has it
    from matplotlib.figure import Figure

    root = ElementTree.fromstring(svg.replace(" xmlns=", " data-xmlns=", 1))
    width, height = map(float, root.attrib["viewBox"].split()[2:])
    with rc_context({"font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"]}):
        figure = Figure(figsize=(width / _INCH, height / _INCH))
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0))
        axes.set_axis_off()
        _add_elements(axes, root, 0, 0)
    return figure


def _add_elements(axes: "Axes", parent: ElementTree.Element, x: float, y: float) -> None:
    """Add what is in an element whose origin is moved."""
    from matplotlib.transforms import Affine2D

    for element in parent:
        if element.tag == "g":
            dx, dy = map(float, re.findall(r"[\d.-]+", element.attrib["transform"]))
            _add_elements(axes, element, x + dx, y + dy)
        elif element.tag != "style":
            place = Affine2D().translate(x, y) + axes.transData
            (_add_text if element.tag == "text" else _add_shape)(axes, element, place)


def _add_text(axes: "Axes", element: ElementTree.Element, place: Any) -> None:
    style = _style_of(element)
    axes.text(
        float(element.attrib["x"]),
        float(element.attrib["y"]),
        element.text or "",
        transform=place,
        color=style["fill"],
        fontsize=float(style["font-size"].removesuffix("px")) * _POINT,
        fontweight=int(style.get("font-weight", "400")),
        ha={"end": "right", "middle": "center"}.get(style.get("text-anchor", ""), "left"),
        parse_math=False,
    )


def _add_shape(axes: "Axes", element: ElementTree.Element, place: Any) -> None:
    from matplotlib.patches import Circle, PathPatch, Rectangle
    from matplotlib.path import Path as Outline

    style = _style_of(element)
    dashes = [float(length) for length in style.get("stroke-dasharray", "").split()]
    look: dict[str, Any] = {
        "facecolor": style.get("fill", "none"),
        "edgecolor": style.get("stroke", "none"),
        "linewidth": float(style.get("stroke-width", "0px").removesuffix("px")) * _POINT,
        "linestyle": (0, dashes) if dashes else "-",
        "alpha": float(style.get("opacity", "1")),
    }
    shape: Any
    if element.tag == "path":
        shape = PathPatch(Outline(*_read_path(element.attrib["d"])), **look)
    elif element.tag == "circle":
        x, y, radius = (float(element.attrib[name]) for name in ("cx", "cy", "r"))
        shape = Circle((x, y), radius, **look)
    else:
        x, y, width, height = (float(element.attrib[name]) for name in ("x", "y", "width", "height"))
        shape = Rectangle((x, y), width, height, **look)
    shape.set_transform(place)
    axes.add_artist(shape)


def _read_path(text: str) -> tuple[list[tuple[float, float]], list[int]]:
    """Return the corners of a path, and matplotlib's codes for the ways to them."""
    x = y = 0.0
    corners, codes = [], []
    for command, numbers in re.findall(r"([MLHVZ])([^MLHVZ]*)", text):
        values = [float(number) for number in numbers.split()]
        x = x if command in "VZ" else values[0]
        y = y if command in "HZ" else values[-1]
        corners.append((x, y))
        codes.append({"M": 1, "Z": 79}.get(command, 2))
    return corners, codes


def _style_of(element: ElementTree.Element) -> dict[str, str]:
    """Apply the rules of drawing.css to an element."""
    css, classes = _read("drawing.css"), set(element.get("class", "").split())
    colors = dict(re.findall(r"(--\w+): (#\w+);", css))
    style: dict[str, str] = {"fill": element.attrib["fill"]} if "fill" in element.attrib else {}
    for tag, kinds, rules in _RULE.findall(css):
        if tag in ("", element.tag) and classes.issuperset(kinds.split(".")[1:]):
            style.update(rule.split(": ") for rule in rules.rstrip(";").split("; "))
    style = {name: colors.get(value.removeprefix("var(").removesuffix(")"), value) for name, value in style.items()}
    return {name: style["color"] if value == "currentColor" else value for name, value in style.items()}


_SLOW, _FEWER = 5.0, 2.0


def slowest_shown(times: Sequence[float]) -> float:
    """Return where an axis of times may end, so that one that is far slower than most does not squeeze all others."""
    first = min(times)
    slowest = max(time for time in times if time - first <= _SLOW * (median(times) - first))
    return slowest if first < slowest and max(times) - first > _FEWER * (slowest - first) else max(times)
