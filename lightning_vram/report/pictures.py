"""Files that pictures are written to."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

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
