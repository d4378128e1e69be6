"""The pictures of files of results."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tests.benchmarks.report.bar_chart import draw_bars
from tests.benchmarks.report.bars import read_bars, read_peak_bars
from tests.benchmarks.report.figures import save_figure
from tests.benchmarks.report.points import read_panels
from tests.benchmarks.report.results import ResultFile
from tests.benchmarks.report.scatter import draw_scatter

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def drawable(file: ResultFile) -> list[str]:
    """What pictures there are of a file: ``"peak_and_time"``, ``"biggest"``, ``"peaks"``, or none.

    Args:
        file: Whose rows are looked at. Rows that do not say by whom a way is are not drawn.
    """
    return list(_pictures(file))


def save_pictures(files: Sequence[ResultFile], folder: Path) -> list[Path]:
    """Draw what there is to draw into PNG files of a folder, which is made if it is not there.

    Args:
        files: In the order of the pictures.
        folder: Where pictures are written, as ``<name of the file>_<what is drawn>.png``; older ones are replaced.

    Returns:
        The pictures' paths.

    Raises:
        ModuleNotFoundError: If there is something to draw and matplotlib is not installed.
        OSError: If the folder cannot be made.
    """
    saved: list[Path] = []
    for file in files:
        for what, draw in _pictures(file).items():
            folder.mkdir(parents=True, exist_ok=True)
            path = _free_name(folder, f"{file.path.stem}_{what}", saved)
            if find_spec("matplotlib") is None:
                raise ModuleNotFoundError("a picture needs matplotlib: pip install matplotlib.")
            save_figure(draw(), path)
            saved.append(path)
    return saved


def _pictures(file: ResultFile) -> dict[str, Callable[[], "Figure"]]:
    panels, bars, peaks = read_panels(file), read_bars(file), read_peak_bars(file)
    pictures: dict[str, Callable[[], Figure]] = {}
    if panels:
        pictures["peak_and_time"] = lambda: draw_scatter(panels, file.caption)
    if bars:
        pictures["biggest"] = lambda: draw_bars(bars, file.caption)
    if peaks:
        pictures["peaks"] = lambda: draw_bars(peaks, file.caption)
    return pictures


def _free_name(folder: Path, stem: str, saved: Sequence[Path]) -> Path:
    """Files of the same name may come from several folders."""
    path, number = folder / f"{stem}.png", 2
    while path in saved:
        path, number = folder / f"{stem}_{number}.png", number + 1
    return path
