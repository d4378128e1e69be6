"""Tables of files of results: a row for each way to train, with the numbers that all suites share in front."""

from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from lightning_vram.memory.units import format_bytes
from lightning_vram.report.benchmarks.points import ALLOCATED, TRACKED
from lightning_vram.report.benchmarks.results import ResultFile, Row, machine_differences
from lightning_vram.report.tables import NOT_KNOWN, format_seconds, label, literal

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
_OF_PLAIN = (TRACKED, ALLOCATED, "largest")  # beside which their ratio stands


def result_tables(files: Sequence[ResultFile]) -> RenderableType:
    """A table for each workload of each file, and what differs between the machines that files come from.

    Args:
        files: At least one.
    """
    parts: list[RenderableType] = []
    for file in files:
        parts += [Text(f"{literal_text(file.path.name)}: {literal_text(file.suite)}", style="bold")]
        parts += [Text(literal_text(file.caption), style="dim"), ""]
        for name, rows in file.tables.items():
            workloads = dict.fromkeys(row.get("workload") for row in rows)
            for workload in workloads:
                title = workload or (name if len(file.tables) > 1 else None)
                parts += [_table([row for row in rows if row.get("workload") == workload], title), ""]
    differences = machine_differences(files)
    return Group(*parts, *(Text(literal_text(line), style="bold yellow") for line in differences))


def literal_text(text: str) -> str:
    """Text of a file on one line, with nothing that speaks to the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _table(rows: Sequence[Row], title: str | None) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.title, table.title_justify, table.title_style = title and literal(title), "left", "bold"
    columns = _columns(rows)
    for heading, is_text, _ in columns:
        table.add_column(literal(heading), justify="left" if is_text else "right", overflow="fold")
    has_errors = any(row.get("error") for row in rows)
    if has_errors:
        table.add_column("did not run", overflow="fold", style="red")
    for row in rows:
        table.add_row(
            *(show(row) for *_, show in columns), *([literal(str(row.get("error") or ""))] if has_errors else [])
        )
    return table


def _columns(rows: Sequence[Row]) -> list[tuple[str, bool, Callable[[Row], str]]]:
    """Heading, whether it is text, and what a row has there."""
    there = dict.fromkeys(name for row in rows for name, value in row.items() if value is not None)
    names = [name for name in there if name not in _HIDDEN and not name.startswith("all_")]
    names = [name for name in names if not any(isinstance(row.get(name), list | dict) for row in rows)]
    ordered = [*(name for name in _FIRST if name in names), *(name for name in names if name not in _FIRST)]
    plain = next((row for row in rows if row.get("by", row.get("variant")) == "plain"), {})
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
        return literal(str(value))
    if name.endswith("_bytes"):
        return format_bytes(value)
    if name.startswith("seconds") or name.endswith("_seconds"):
        return f"{value:.2f}" if "_of_" in name else format_seconds(value)
    return f"{value:.2f}" if isinstance(value, float) else f"{value:,}"
