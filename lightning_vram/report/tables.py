"""Tables of one run's memory, and what all tables share: names may wrap, numbers are never cut."""

import html
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from textwrap import wrap

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from lightning_vram.memory.device.measurement import Measurement, largest
from lightning_vram.memory.units import format_bytes

NOT_KNOWN = "-"


def label(name: str) -> str:
    """A name of a category or phase as text: ``"optimizer_state"`` -> ``"optimizer state"``."""
    return name.replace("_", " ")


def wrap_name(name: str, width: int) -> list[str]:
    """Break a long name after a space, or before the arguments of a feature where that is not enough."""
    for text in (name, re.sub(r"(?<![=\w.])([\w.]+)\((?!\))", r"\1( ", name)):
        lines = wrap(text, width, break_long_words=False, break_on_hyphens=False)
        if all(len(line) <= width for line in lines):
            break
    return [line.replace("( ", "(") for line in lines]


def printable(text: str) -> str:
    """Text of a file on one line, without control characters."""
    return "".join(character if character.isprintable() else "?" for character in text)


def literal(text: str) -> str:
    """Text of a file as it stands there: nothing in it is markup, and nothing speaks to the terminal."""
    return escape(printable(text))


def format_seconds(seconds: float | None) -> str:
    """A duration in seconds or milliseconds, or a dash where none is known."""
    if seconds is None:
        return NOT_KNOWN
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1000:.1f} ms"


def as_text(shown: RenderableType, width: int = 100) -> str:
    """Render without colours, for ``print`` and logs."""
    file = io.StringIO()
    Console(file=file, width=width, color_system=None, legacy_windows=False).print(shown)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def plain_table() -> Table:
    """Return a table without lines, for columns of :func:`add_names` and :func:`add_numbers`."""
    return Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")


def add_names(table: Table, heading: str) -> None:
    """Add a column of text, which wraps where the terminal is small."""
    table.add_column(heading, overflow="fold")


def add_numbers(table: Table, *headings: str) -> None:
    """Add columns of numbers, which keep their width."""
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)


@dataclass(frozen=True)
class Rows:
    """A table of text, for a terminal or a page; a single cell is as wide as the table."""

    name: str
    lines: Sequence[tuple[str, ...]]
    colors: Sequence[str] = ()  # of the first lines
    columns: Sequence[str] = ()  # names of all columns but the first

    def terminal(self) -> Table:
        """Return it for a terminal, or a log."""
        table = plain_table()
        add_names(table, self.name)
        add_numbers(table, *(self.columns or [""] * (max(map(len, self.lines), default=1) - 1)))
        for number, (first, *others) in enumerate(self.lines):
            square = [("\N{BLACK SQUARE} ", self.colors[number])] if number < len(self.colors) else []
            table.add_row(Text.assemble(*square, printable(first)), *map(literal, others))
        return table

    def html(self) -> str:
        """Return it for a page."""
        body = ""
        for number, line in enumerate(self.lines):
            square = f'<u style="background:{self.colors[number]}"></u>' if number < len(self.colors) else ""
            cells = "</td><td>".join(map(html.escape, line))
            body += f"<tr><td{' colspan=9' * (len(line) == 1)}>{square}{cells}</td></tr>"
        heads = "".join(f"<th>{html.escape(column)}</th>" for column in self.columns)
        name = html.escape(self.name)
        first = f"<th>{name}</th>{heads}" if heads else f'<th colspan="9">{name}</th>'
        return f"<table><tr>{first}</tr>{body}</table>"


def _sections(peak: Measurement) -> list[dict[str, int | None]]:
    return [
        {
            "peak allocated": peak.peak_allocated_bytes,
            "peak reserved": peak.peak_reserved_bytes,
            "allocated after": peak.allocated_bytes,
            "reserved after": peak.reserved_bytes,
            "saved for backward": peak.saved_for_backward_bytes,
            "host peak": peak.host_peak_bytes or None,
        },
        {f"during {label(phase)}": size for phase, size in peak.peak_by_phase.items()},
        {label(category): size for category, size in peak.peak_by_category.items()},
        {literal(module) or "(no module)": size for module, size in peak.peak_by_module.items()},
    ]


def add_peaks(
    table: Table, peaks: Sequence[Measurement | None], cells: Callable[[list[int | None]], Sequence[str]]
) -> None:
    """Add what is known of readings, a column for each; ``cells`` writes the sizes of a row."""
    for section in zip(*(_sections(peak) if peak is not None else [{}] * 4 for peak in peaks), strict=True):
        for name in dict.fromkeys(chain(*section)):
            sizes = [one.get(name) for one in section]
            if any(size is not None for size in sizes):
                table.add_row(name, *cells(sizes))
        table.add_section()


def memory_table(measurements: Sequence[Measurement]) -> Table:
    """One column per stage: the reading with the highest peak, by phase, category and module."""
    stages = dict.fromkeys(measurement.stage for measurement in measurements)
    peaks = [largest(m for m in measurements if m.stage == stage) for stage in stages]
    sources = ", ".join(dict.fromkeys(f"{peak.device} ({peak.source})" for peak in peaks))
    table = Table(title=f"Peak memory on {literal(sources)}, {len(measurements)} readings", title_justify="left")
    add_names(table, "")
    add_numbers(table, *(f"{literal(peak.stage)}\nepoch {peak.epoch}\nbatch {peak.batch_idx}" for peak in peaks))
    add_peaks(table, peaks, lambda sizes: [NOT_KNOWN if size is None else format_bytes(size) for size in sizes])
    times = [m.seconds_per_batch for m in measurements if m.seconds_per_batch is not None]
    if times:
        table.caption = f"Median time per training batch: {format_seconds(times[-1])}."
    return table
