"""A file of results, read and checked.

``{"suite": ..., "machine": {...}, "rows": [{...}, ...]}``. A row is flat. All suites share ``workload``, ``variant``
(the name of a way to train), ``by`` (``"plain"``, ``"ours"`` or a library), ``peak_bytes``, ``seconds_per_step``,
``max_memory_allocated_bytes``, ``seconds_of_first`` with ``_low`` and ``_high``, and ``error``, which stands instead of
figures.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

PLAIN, OURS = "plain", "ours"
BASELINE = "baseline"  # what a reader sees of the first
OUT_OF_MEMORY = "out of memory"
_TEXTS = ("workload", "variant", "by", "error", "what")
_COUNTS = ("peak_bytes", "max_memory_allocated_bytes", "max_memory_reserved_bytes", "budget_bytes", "largest")
_TIMES = ("seconds_per_step", "seconds_of_first", "seconds_of_first_low", "seconds_of_first_high")


@dataclass(frozen=True)
class ResultFile:
    """What one file holds.

    Args:
        path: Where it lies.
        suite: What was measured; the file's name where it does not say.
        machine: Device, driver and versions.
        date: Day of the measurement, or, where the file does not say, on which it was written: ``"2026-11-24"``.
        tables: Rows by the name under which the file has them, ``"rows"`` as a rule. None is empty.
    """

    path: Path
    suite: str
    machine: Mapping[str, Any]
    date: str
    tables: Mapping[str, Sequence[Row]]

    @property
    def rows(self) -> list[Row]:
        """Of all tables."""
        return [row for rows in self.tables.values() for row in rows]

    @property
    def caption(self) -> str:
        """Device, driver, torch and date, in one line."""
        device, driver, torch = (self.machine.get(name) for name in ("device", "driver", "torch"))
        parts = (
            device or "device not known",
            driver and f"driver {driver}",
            torch and f"torch {torch}",
            f"file of {self.date}",
        )
        return ", ".join(str(part) for part in parts if part)


def as_shown(name: str) -> str:
    """Write a name of a result file as readers know it: ``"plain"`` is the baseline."""
    return BASELINE if name == PLAIN else name.replace(f"of {PLAIN}", f"of {BASELINE}")


def read_results(path: Path) -> ResultFile:
    """Read a file of results.

    Args:
        path: JSON file that a benchmark wrote.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is no file of results, or has no rows; says what is wrong, and in which row.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError):
        raise ValueError(f"{path} is not a file of results: it is not JSON.") from None
    if not isinstance(content, dict) or not isinstance(content.get("machine"), dict):
        raise ValueError(f'{path} is not a file of results: those have "machine" and "rows".')
    tables = {name: tuple(value) for name, value in content.items() if isinstance(value, list) and value}
    tables = {name: rows for name, rows in tables.items() if name == "rows" or isinstance(rows[0], dict)}
    if not tables:
        raise ValueError(f"{path} has no rows: nothing was measured.")
    for rows in tables.values():
        for number, row in enumerate(rows, start=1):
            _check(row, f"{path}, row {number}")
    written = datetime.fromtimestamp(path.stat().st_mtime, tz=UTC)
    date = str(content.get("date") or content["machine"].get("date") or written.date())
    return ResultFile(path, str(content.get("suite") or path.stem), content["machine"], date, tables)


def machine_differences(files: Sequence[ResultFile]) -> list[str]:
    """Say in a line for each field in which machines of files differ, and which file has which.

    Args:
        files: Whose figures stand side by side.
    """
    lines = []
    for name in dict.fromkeys(name for file in files for name in file.machine):
        owners: dict[str, list[str]] = {}
        for file in files:
            value = file.machine.get(name)
            owners.setdefault("none" if value is None else str(value), []).append(file.path.name)
        if len(owners) > 1:
            parts = [f"{value} ({', '.join(names)})" for value, names in owners.items()]
            lines.append(f"machines differ in {name.replace('_', ' ')}: {'; '.join(parts)}")
    return lines


def _check(row: Any, where: str) -> None:
    """Raise ``ValueError`` for a value of a wrong kind, before anything computes with it."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: a row has names and values, got {row!r:.80}.")
    checks: tuple[tuple[Sequence[str], Callable[[Any], bool], str], ...] = (
        (_TEXTS, lambda value: isinstance(value, str), "text"),
        (_COUNTS, lambda value: _is_number(value) and isinstance(value, int), "a whole number, 0 or more"),
        (_TIMES, lambda value: _is_number(value) and value > 0, "a number above 0"),
    )
    for names, is_right, what in checks:
        for name in names:
            value = row.get(name)
            if value is not None and not is_right(value):
                raise ValueError(f"{where}: {name} must be {what}, got {value!r:.80}.")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf
