"""An estimate that can be printed and drawn. The numbers know nothing of tables: they belong to a floor below."""

import functools
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import ParamSpec

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from typing_extensions import override

from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.estimate.pictures import picture
from lightning_vram.report.estimate.step import (
    COLORS,
    category_rows,
    fact_rows,
    module_name,
    module_rows,
    moment_rows,
    peak_sentence,
    process_rows,
    verdict,
)
from lightning_vram.report.tables import add_names, add_numbers, as_text, label, literal, plain_table

_MAX_MODULES = 11  # with all others
_BAR_WIDTH = 10
_MAX_NAME = 27
_ANY_WIDTH = 1000  # to measure without a terminal's limit


def estimate_table(estimate: MemoryEstimate) -> RenderableType:
    """Everything in an estimate, in about 30 lines of 100 columns, or more of fewer. It needs no colours."""
    tables = _SideBySide(
        Group(
            _categories(estimate),
            "",
            _sizes("their peak in", moment_rows(estimate)),
            "",
            _texts("the run", fact_rows(estimate)),
        ),
        Group(_modules(estimate), "", _sizes("the process", process_rows(estimate))),
    )
    style = f"bold {'green' if estimate.fits else 'red'}"
    words = [Text(verdict(estimate), style=style), Text(peak_sentence(estimate))]
    notes = [Text(f"Note: {note}") for note in estimate.notes]
    return Group(*words, "", tables, *([""] if notes else []), *notes)


class _SideBySide:
    """Two columns of tables; one where the terminal is too small for both."""

    def __init__(self, left: Group, right: Group) -> None:
        self._columns = left, right

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        grid = Table.grid(padding=(0, 3, 0, 0))
        grid.add_row(*self._columns)
        is_wide = Measurement.get(console, options.update_width(_ANY_WIDTH), grid).maximum <= options.max_width
        yield grid if is_wide else Group(self._columns[0], "", self._columns[1])


def _categories(estimate: MemoryEstimate) -> Table:
    table = _table("tensors at the peak", "bytes", "share")
    table.add_column("", width=_BAR_WIDTH)
    for category, num_bytes in category_rows(estimate):
        style = COLORS[category]
        bar = ProgressBar(estimate.peak_bytes, num_bytes, width=_BAR_WIDTH, complete_style=style, finished_style=style)
        table.add_row(label(category), format_bytes(num_bytes), _share(num_bytes, estimate), bar)
    table.add_row("all", format_bytes(estimate.peak_bytes), "", "", style="bold")
    return table


def _modules(estimate: MemoryEstimate) -> Table:
    table = _table("modules at the peak", "bytes", "share")
    for fqn, num_bytes in module_rows(estimate, _MAX_MODULES):
        table.add_row(literal(module_name(fqn, _MAX_NAME)), format_bytes(num_bytes), _share(num_bytes, estimate))
    return table


def _sizes(name: str, sizes: Iterable[tuple[str, int]]) -> Table:
    return _texts(name, ((text, format_bytes(num_bytes)) for text, num_bytes in sizes))


def _texts(name: str, pairs: Iterable[tuple[str, str]]) -> Table:
    table = _table(name, "")
    for pair in pairs:
        table.add_row(*map(literal, pair))
    return table


def _table(name: str, *columns: str) -> Table:
    table = plain_table()
    add_names(table, name)
    add_numbers(table, *columns)
    return table


def _share(num_bytes: int, estimate: MemoryEstimate) -> str:
    return f"{num_bytes / estimate.peak_bytes:.0%}" if estimate.peak_bytes else ""


_P = ParamSpec("_P")


@dataclass(frozen=True)
class ShownEstimate(MemoryEstimate):
    """A :class:`MemoryEstimate` whose ``str`` is a table, and which draws itself."""

    @override
    def __str__(self) -> str:
        return as_text(estimate_table(self))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the memory of the training step by category, with the device's limit.

        Args:
            path: File to write: a picture (``.svg``; ``.png`` and ``.pdf`` by matplotlib), or an interactive page
                (``.html``) in one file, with tables.

        Raises:
            ValueError: If the file has another ending, or no tensor was on the device.
            ModuleNotFoundError: If matplotlib is needed and not installed.
        """
        picture(self).write(path)


def shown(estimate_memory: Callable[_P, MemoryEstimate]) -> Callable[_P, ShownEstimate]:
    """Let a function that estimates return what can be printed and drawn."""

    @functools.wraps(estimate_memory)
    def estimate_and_show(*args: _P.args, **kwargs: _P.kwargs) -> ShownEstimate:
        estimate = estimate_memory(*args, **kwargs)
        return ShownEstimate(**{field.name: getattr(estimate, field.name) for field in fields(estimate)})

    return estimate_and_show
