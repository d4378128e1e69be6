"""Figures as a table, and as a file with device and versions."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_vram.memory.units import format_bytes
from tests.benchmarks.measure import Row, describe_machine
from tests.benchmarks.peers import versions_of_peers

_RANGE = ("seconds_of_first_low", "seconds_of_first_high")


def write(suite: str, options: Mapping[str, Any], rows: Sequence[Row], path: Path) -> None:
    """Write figures with the day, device and versions, those of peers among them where they were measured."""
    date = datetime.now(tz=UTC).date().isoformat()
    result = {"suite": suite, "date": date, "machine": describe_machine(), "options": options, "rows": rows}
    if options.get("peers"):
        result["machine"]["peers"] = versions_of_peers()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, default=str) + "\n")


def print_tables(rows: Sequence[Row]) -> None:
    """Print a table for each workload, one line per row, sizes as text."""
    for workload, group in groupby(rows, key=lambda row: row.get("workload")):
        Console(width=160).print(make_table(list(group), workload))


def make_table(rows: Sequence[Row], title: str | None) -> Table:
    """Return one line per row; what all rows share is the title."""
    columns = dict.fromkeys(name for row in rows for name in row if not name.startswith("all_"))
    table = Table(title=title)
    for name in (
        shown := [name for name in columns if name not in ("workload", "by", "wall_seconds_per_step", *_RANGE)]
    ):
        width = 30 if name == "variant" else None
        table.add_column(name.removesuffix("_bytes").replace("_", " "), overflow="fold", min_width=width)
    for row in rows:
        table.add_row(*(show(name, row) for name in shown))
    return table


def show(name: str, row: Row) -> str:
    """Return a figure as text: bytes with their unit, the ratio of times with its smallest and largest."""
    value = row.get(name, "")
    if name == "variant":
        return re.sub(r"\bplain\b", "baseline", value)
    if name == "seconds_of_first":
        return f"{value:.3f} ({row[_RANGE[0]]:.3f} to {row[_RANGE[1]]:.3f})" if name in row else ""
    if isinstance(value, int) and name.endswith("_bytes"):
        return format_bytes(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
