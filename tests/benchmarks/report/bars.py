"""What pictures of sizes show, of the biggest batch or model and of peaks: a bar for each way that ran."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_vram.memory.units import format_bytes
from tests.benchmarks.report.points import ALLOCATED, TRACKED, kind_of, name_of
from tests.benchmarks.report.results import OUT_OF_MEMORY, PLAIN, ResultFile, Row

OOM = "OOM"
PEAK = "peak of the step"


@dataclass(frozen=True)
class Bar:
    """A way to train, and the largest with which it does.

    Args:
        name: As a user writes it; a peer's with its library.
        kind: ``"plain"``, ``"ours"`` or ``"peer"``.
        largest: ``None`` if it did not run at all.
        text: What stands at its end: the number and how many times plain's, or ``"OOM"``.
    """

    name: str
    kind: str
    largest: int | None
    text: str


@dataclass(frozen=True)
class BarPanel:
    """The ways to train one workload in one budget.

    Args:
        workload: Its name.
        what: What is made larger: ``"batch size"``, ``"layers"``.
        budget_bytes: What there is; ``None`` where rows do not say.
        bars: At least one with a length, the best first.
    """

    workload: str
    what: str
    budget_bytes: int | None
    bars: Sequence[Bar]


def read_bars(file: ResultFile) -> list[BarPanel]:
    """Read what there is to draw: a panel for each workload, each thing that is made larger and each budget.

    Args:
        file: Rows that have ``largest`` are read, and rows with an ``error`` beside them.
    """
    rows = [row for row in file.rows if row.get("variant") and row.get("by")]
    panels = dict.fromkeys(_panel_of(row) for row in rows if row.get("largest") is not None)
    return [BarPanel(*panel, _bars([row for row in rows if _belongs(row, panel)])) for panel in panels]


def read_peak_bars(file: ResultFile) -> list[BarPanel]:
    """Read peaks that have no place in a picture beside times: where none was measured, or a way ran out of memory.

    Args:
        file: Rows that have a peak are read, and rows with an ``error`` beside them.
    """
    rows = [row for row in file.rows if row.get("variant") and row.get("by") and "what" not in row]
    panels = []
    for workload in dict.fromkeys(str(row.get("workload", file.suite)) for row in rows):
        some = [row for row in rows if str(row.get("workload", file.suite)) == workload]
        has_times = any(row.get("seconds_per_step") for row in some)
        is_short = any(row.get("error") == OUT_OF_MEMORY for row in some)
        if any(_peak(row) for row in some) and (is_short or not has_times):
            plain = next((_peak(row) for row in some if row["by"] == PLAIN), None)
            bars = [Bar(name_of(row), kind_of(row), _peak(row), _peak_text(row, plain)) for row in some if _ran(row)]
            panels.append(BarPanel(workload, PEAK, None, sorted(bars, key=lambda bar: bar.largest or math.inf)))
    return panels


def _ran(row: Row) -> bool:
    """Whether there is something to show: what ran out of memory has been tried."""
    return row.get("error") == OUT_OF_MEMORY or (_peak(row) or row.get("largest")) is not None


def _peak(row: Row) -> int | None:
    return None if row.get("error") else row.get(ALLOCATED) or row.get(TRACKED)


def _peak_text(row: Row, plain: int | None) -> str:
    peak_bytes = _peak(row)
    if peak_bytes is None:
        return OOM
    ratio = f"  ({peak_bytes / plain:.2f}x)" if plain and row["by"] != PLAIN else ""
    return f"{format_bytes(peak_bytes)}{ratio}"


def _panel_of(row: Row) -> tuple[str, str, int | None]:
    return str(row.get("workload", "")), str(row.get("what", "")), row.get("budget_bytes")


def _belongs(row: Row, panel: tuple[str, str, int | None]) -> bool:
    """A row of a way that did not run may leave out what was made larger, and the budget."""
    fields = (row.get("workload"), row.get("what"), row.get("budget_bytes"))
    if row.get("error"):
        return all(value in (None, wanted) for value, wanted in zip(fields, panel, strict=True))
    return row.get("largest") is not None and _panel_of(row) == panel


def _bars(rows: Sequence[Row]) -> list[Bar]:
    plain = next((row.get("largest") for row in rows if row["by"] == PLAIN), None)
    bars = [Bar(name_of(row), kind_of(row), row.get("largest"), _text(row, plain)) for row in rows if _ran(row)]
    return sorted(bars, key=lambda bar: -(bar.largest or 0))


def _text(row: Row, plain: int | None) -> str:
    if row.get("error"):
        return OOM
    ratio = f"  ({row['largest'] / plain:.2f}x)" if plain and row["by"] != PLAIN else ""
    return f"{row['largest']:,}{ratio}" if row["largest"] else OOM
