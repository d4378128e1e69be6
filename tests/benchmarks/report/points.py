"""What a picture of peak against step time shows: points and the front."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.benchmarks.report.results import OURS, PLAIN, ResultFile, Row, as_shown

ALLOCATED, TRACKED = "max_memory_allocated_bytes", "peak_bytes"
PEER = "peer"


@dataclass(frozen=True)
class Point:
    """A way to train: what it takes and how long.

    Args:
        name: As a user writes it; a peer's with its library.
        kind: ``"plain"``, ``"ours"`` or ``"peer"``.
        peak_bytes: Peak of the step.
        time: Of a step: in seconds, or as a multiple of the first way's. The panel says which.
        low: The smallest that was measured; ``time`` where it is not known.
        high: The largest.
    """

    name: str
    kind: str
    peak_bytes: int
    time: float
    low: float
    high: float


@dataclass(frozen=True)
class Panel:
    """The ways to train one workload.

    Args:
        workload: Its name.
        points: At least one.
        first: The way whose time is 1, if times are multiples; ``None`` if they are seconds.
        first_seconds: Its time, if known.
        is_tracked: Whether peaks are tracked bytes rather than those of the device's allocator.
    """

    workload: str
    points: Sequence[Point]
    first: str | None
    first_seconds: float | None
    is_tracked: bool


def read_panels(file: ResultFile) -> list[Panel]:
    """Read what there is to draw: a panel for each workload of which one row has ``by``, a peak and a time.

    Args:
        file: Rows of the suite ``biggest`` have no peak against time.
    """
    rows = [row for row in file.rows if row.get("variant") and row.get("by") and "what" not in row]
    names = dict.fromkeys(str(row.get("workload", file.suite)) for row in rows)
    found = [_panel(name, [row for row in rows if str(row.get("workload", file.suite)) == name]) for name in names]
    return [panel for panel in found if panel is not None]


def front(points: Sequence[Point]) -> list[Point]:
    """Points than which none is better in both, from the fastest to the smallest.

    Args:
        points: Of one panel.
    """
    unbeaten: list[Point] = []
    for point in sorted(points, key=lambda one: (one.time, one.peak_bytes)):
        if not unbeaten or point.peak_bytes < unbeaten[-1].peak_bytes:
            unbeaten.append(point)
    return unbeaten


def name_of(row: Row) -> str:
    """The way's name, ``"baseline"`` for plain; a peer's with its library, unless the name says it."""
    name, by = as_shown(str(row["variant"])), str(row["by"])
    return name if by in (PLAIN, OURS) or by.lower() in name.lower() else f"{name} ({by})"


def kind_of(row: Row) -> str:
    """Plain, ours or a peer."""
    return str(row["by"]) if row["by"] in (PLAIN, OURS) else PEER


def _panel(workload: str, rows: Sequence[Row]) -> Panel | None:
    ran = [row for row in rows if not row.get("error")]
    peak_field = ALLOCATED if any(row.get(ALLOCATED) is not None for row in ran) else TRACKED
    ran = [row for row in ran if row.get(peak_field) is not None]
    is_ratio = bool(ran) and all(row.get("seconds_of_first") for row in ran)
    read: Callable[[Row], Point | None] = lambda row: _point(row, peak_field, is_ratio=is_ratio)  # noqa: E731
    points = [point for point in map(read, ran) if point is not None]
    if not points:
        return None
    first = rows[0] if is_ratio else None
    return Panel(
        workload,
        points,
        None if first is None else name_of(first),
        None if first is None else first.get("seconds_per_step"),
        peak_field == TRACKED,
    )


def _point(row: Row, peak_field: str, *, is_ratio: bool) -> Point | None:
    time = row.get("seconds_of_first" if is_ratio else "seconds_per_step")
    if time is None:
        return None
    low, high = (row.get(f"seconds_of_first_{end}") if is_ratio else None for end in ("low", "high"))
    return Point(name_of(row), kind_of(row), row[peak_field], time, low or time, high or time)
