"""Tables of files of results: a row for each way to train, with the numbers that all suites share in front."""

from collections.abc import Callable, Sequence

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from lightning_vram.memory.units import format_bytes
from lightning_vram.report.tables import (
    NOT_KNOWN,
    add_names,
    add_numbers,
    format_seconds,
    label,
    literal,
    plain_table,
    printable,
)
from tests.benchmarks.report.points import ALLOCATED, TRACKED
from tests.benchmarks.report.results import PLAIN, ResultFile, Row, as_shown, machine_differences

_SPREAD = ("seconds_of_first_low", "seconds_of_first_high")
_HIDDEN = ("workload", "error", "traceback", *_SPREAD)
_NAMES = ("variant", "by", "what")
_FIRST = (*_NAMES, "largest", TRACKED, ALLOCATED, "max_memory_reserved_bytes", "seconds_per_step", "seconds_of_first")
_HEADINGS = {
    "variant": "",
    TRACKED: "peak, tracked",
    ALLOCATED: "max allocated",
    "max_memory_reserved_bytes": "max reserved",
    "seconds_per_step": "time per step",
    "seconds_of_first": "of baseline (low to high)",
}
_ERROR = "did not run"
_GAP, _MOST_TEXT = 2, 30  # characters
_Column = tuple[str, bool, Sequence[str]]  # heading, whether it is text, cells
_OF_PLAIN = (TRACKED, ALLOCATED, "largest")  # beside which their ratio stands


def result_tables(files: Sequence[ResultFile], *, all_rows: bool = False) -> RenderableType:
    """A table for each workload of each file, and what differs between the machines that files come from.

    Args:
        files: At least one.
        all_rows: Whether to show rows that did not run, with the reason.
    """
    parts: list[RenderableType] = []
    num_left_out = 0
    for file in files:
        parts += [Text(f"{printable(file.path.name)}: {printable(file.suite)}", style="bold")]
        parts += [Text(printable(file.caption), style="dim"), ""]
        for name, rows in file.tables.items():
            shown = [row for row in rows if all_rows or not row.get("error")]
            num_left_out += len(rows) - len(shown)
            for workload in dict.fromkeys(row.get("workload") for row in shown):
                title = workload or (name if len(file.tables) > 1 else None)
                parts += [_Table([row for row in shown if row.get("workload") == workload], title)]
    if num_left_out:
        parts.append(Text(f"Left out: {num_left_out} row{'s' * (num_left_out > 1)} that did not run (shown by --all)."))
    differences = machine_differences(files)
    return Group(*parts, *(Text(printable(line), style="bold yellow") for line in differences))


class _Table:
    """Rows of one workload. Columns that a narrow terminal has no place for follow below, with the names again."""

    def __init__(self, rows: Sequence[Row], title: str | None) -> None:
        self._title = title and literal(title)
        (_, _, names), *columns = [
            (heading, is_text, [show(row) for row in rows]) for heading, is_text, show in _columns(rows)
        ]
        if any(row.get("error") for row in rows):
            columns.append((_ERROR, True, [literal(str(row.get("error") or "")) for row in rows]))
        self._names, self._columns = names, columns

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width_of_names = min(_width(self._names), options.max_width // 3)
        title, columns = self._title, list(self._columns)
        while columns:
            room, num_columns = options.max_width - width_of_names, 0
            for heading, is_text, cells in columns:
                room -= _GAP + min(_width([heading, *cells]), _MOST_TEXT if is_text else options.max_width)
                if room < 0 and num_columns:
                    break
                num_columns += 1
            yield self._part(columns[:num_columns], title)
            yield ""
            title, columns = None, columns[num_columns:]

    def _part(self, columns: Sequence[_Column], title: str | None) -> Table:
        table = plain_table()
        table.title, table.title_justify, table.title_style = title, "left", "bold"
        add_names(table, "")
        for heading, is_text, _ in columns:
            (add_names if is_text else add_numbers)(table, literal(heading))
        for row in zip(self._names, *(cells for *_, cells in columns), strict=True):
            table.add_row(*row)
        return table


def _width(cells: Sequence[str]) -> int:
    return max(map(cell_len, cells))


def _columns(rows: Sequence[Row]) -> list[tuple[str, bool, Callable[[Row], str]]]:
    """Heading, whether it is text, and what a row has there."""
    there = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
    names = [name for name in there if name not in _HIDDEN and not name.startswith("all_")]
    names = [name for name in names if not any(isinstance(row.get(name), list | dict) for row in rows)]
    ordered = [*(name for name in _FIRST if name in names), *(name for name in names if name not in _FIRST)]
    plain = next((row for row in rows if row.get("by", row.get("variant")) == PLAIN), {})
    columns: list[tuple[str, bool, Callable[[Row], str]]] = []
    for name in ordered:
        is_text = all(isinstance(row.get(name, ""), str) for row in rows)
        columns.append((_heading(name), is_text, lambda row, name=name: _show(name, row)))  # type: ignore[misc]
        if name in _OF_PLAIN and plain.get(name):
            of_plain = plain[name]
            columns.append(("of baseline", False, lambda row, name=name, of=of_plain: _show_ratio(name, row, of)))  # type: ignore[misc]
    return columns


def _heading(name: str) -> str:
    return _HEADINGS.get(name, label(name.removesuffix("_bytes").removesuffix("_seconds")))


def _show_ratio(name: str, row: Row, of: int) -> str:
    return _nothing(row) if row.get(name) is None else f"{row[name] / of:.2f}"


def _nothing(row: Row) -> str:
    return "" if row.get("error") else NOT_KNOWN


def _show(name: str, row: Row) -> str:
    value = row.get(name)
    if value is None:
        return _nothing(row)
    if name == "seconds_of_first":
        low, high = (row.get(end) for end in _SPREAD)
        return f"{value:.2f}" if low is None or high is None else f"{value:.2f} ({low:.2f} to {high:.2f})"
    if isinstance(value, bool | str):
        return literal(as_shown(str(value)))
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.startswith("seconds") or name.endswith("_seconds"):
        return f"{value:.2f}" if "_of_" in name else format_seconds(value)
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}"
