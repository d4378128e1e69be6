"""What a picture of the biggest batch or model shows: a bar for each way, or why it has none."""

from collections.abc import Sequence
from dataclasses import dataclass

from lightning_vram.report.benchmarks.points import kind_of, name_of
from lightning_vram.report.benchmarks.results import OUT_OF_MEMORY, PLAIN, ResultFile, Row

OOM = "OOM"


@dataclass(frozen=True)
class Bar:
    """A way to train, and the largest with which it does.

    Args:
        name: As a user writes it; a peer's with its library.
        kind: ``"plain"``, ``"ours"`` or ``"peer"``.
        largest: ``None`` if it did not run at all.
        text: What stands at its end: the number and how many times plain's, ``"OOM"``, or another reason.
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
        bars: At least one with a length.
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
    return [Bar(name_of(row), kind_of(row), row.get("largest"), _text(row, plain)) for row in rows]


def _text(row: Row, plain: int | None) -> str:
    if row.get("error"):
        return OOM if row["error"] == OUT_OF_MEMORY else str(row["error"])
    ratio = f"  ({row['largest'] / plain:.2f}x)" if plain and row["by"] != PLAIN else ""
    return f"{row['largest']:,}{ratio}" if row["largest"] else OOM
