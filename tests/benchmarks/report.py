"""Figures as a table, and as a file with device and versions."""

import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_vram.memory.units import format_bytes
from tests.benchmarks.measure import Row, describe_machine


def report(suite: str, rows: list[Row], output: Path | None) -> None:
    """Print the table, and write the figures with device and versions to ``output``."""
    Console(width=160).print(make_table(rows))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(json.dumps({"suite": suite, "machine": describe_machine(), "rows": rows}, indent=1) + "\n")


def make_table(rows: list[Row]) -> Table:
    """One line per row, sizes as text."""
    columns = list(dict.fromkeys(name for row in rows for name in row if not name.startswith("all_")))
    table = Table()
    for name in columns:
        table.add_column(name.removesuffix("_bytes").replace("_", " "), overflow="fold")
    for row in rows:
        table.add_row(*(show(name, row.get(name)) for name in columns))
    return table


def show(name: str, value: object) -> str:
    if isinstance(value, int):
        return format_bytes(value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)
