"""Print tables of result files of ``python -m tests.benchmarks``, and draw pictures where a folder is named."""

from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, RenderableType

from lightning_vram.commands.options import describe
from tests.benchmarks.report import drawable, read_results, result_tables, save_pictures

_MIN_WIDTH, _MAX_WIDTH = 100, 1000  # characters, in a log file


def main(args: Sequence[str] | None = None) -> None:
    """Print and draw; a file that is no file of results, or a missing matplotlib, is one line and exit code 2."""
    parser = ArgumentParser(prog="python -m tests.benchmarks.report", description=__doc__)
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="file that python -m tests.benchmarks wrote"
    )
    parser.add_argument("--all", action="store_true", help="also rows that could not run")
    parser.add_argument("-o", "--output", type=Path, metavar="FOLDER", help="draw pictures into this folder")
    given = parser.parse_args(args)
    try:
        for part in report(given.files, given.output, all_rows=given.all):
            _show(part)
    except (OSError, ValueError, ModuleNotFoundError) as error:
        parser.error(describe(error))


def report(paths: Sequence[Path], output: Path | None, *, all_rows: bool) -> Iterator[RenderableType]:
    """Yield what is printed, part by part."""
    results = [read_results(path) for path in paths]
    yield result_tables(results, all_rows=all_rows)
    if output is None:
        return
    for path in save_pictures(results, output):
        yield f"{path}: drawn."
    without = [file.path.name for file in results if not drawable(file)]
    if without:
        yield f"Nothing to draw in {', '.join(without)}: no row has by, a peak and seconds_per_step, or largest."


def _show(part: RenderableType) -> None:
    console = Console()
    if isinstance(part, str):
        print(part)
    elif console.is_terminal:
        console.print(part)
    else:  # a table cut to 80 columns would lose its numbers
        width = max(_MIN_WIDTH, Console(width=_MAX_WIDTH).measure(part).maximum)
        Console(width=width).print(part)


if __name__ == "__main__":
    main()
