"""The page itself, in Markdown."""

from collections.abc import Iterable, Sequence
from math import nan
from pathlib import Path

from lightning_vram.memory.units import MIB, format_bytes
from lightning_vram.report.out_of_memory.causes import Cause, find_cause
from lightning_vram.report.out_of_memory.facts import OutOfMemory
from lightning_vram.report.plan.choices import Choice, cells
from lightning_vram.report.tables import label

_MOST_MODULES = 8
_MOST_READINGS = 8
_LIMIT = (
    "Available to this step: the memory that its tensors may use. Other tensors and processes are subtracted; it is at "
    "most the estimated peak of the step minus the bytes asked for."
)


def write_page(found: OutOfMemory, path: Path, pictures: Sequence[str] = ()) -> None:
    """Write a page."""
    path.write_text(page(found, pictures), encoding="utf-8")


def page(found: OutOfMemory, pictures: Sequence[str] = ()) -> str:
    """Return the page: see :func:`write_page`."""
    cause = find_cause(found)
    sections = [
        f"# Out of memory: {cause.title}",
        cause.meaning(found),
        _facts(found),
        _section("What helps", _remedies(found, cause)),
        _section("What held the memory", _held(found)),
        _section("At the ends of the last batches", _growth(found)),
        *_pictures(pictures),
        _section("The error", f"```text\n{found.message.strip()}\n```"),
    ]
    return "\n\n".join(filter(None, sections)) + "\n"


def summary(found: OutOfMemory) -> str:
    """Return the cause, and what helps best, in a sentence."""
    cause = find_cause(found)
    best = next((remedy for remedy in found.remedies if remedy.fits), None)
    helps = f"`{best.code}`" if best is not None and cause.needs_leaner_step else cause.hints[0]
    return f"{cause.title}. What helps: {helps}. {found.cut}".rstrip()


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}" if text else ""


def _facts(found: OutOfMemory) -> str:
    request, place = found.request, found.place
    where = f"{place.work}{f' of `{place.module}`' if place.module else ''}"
    rows: list[tuple[str, str]] = [("when", found.stage), ("where", where)]
    rows += [("your line", f"`{place.line}`")] if place.line else []
    sizes = (
        ("asked for", request.asked_bytes),
        (f"{found.device} has", request.total_bytes),
        ("limit of this process", request.limit_bytes),
        ("free", request.free_bytes),
        ("in tensors of this process", request.allocated_bytes),
        ("reserved by it, not allocated", request.cached_bytes),
        ("used by the driver for it", _unless_rounding(request.driver_bytes)),
        ("used by other processes", _unless_rounding(request.other_bytes)),
    )
    rows += [(name, format_bytes(size)) for name, size in sizes if size is not None]
    return _table(("", ""), *rows)


def _unless_rounding(num_bytes: int) -> int | None:
    """Sizes in messages have two decimals: their differences may be nothing."""
    return num_bytes if num_bytes > MIB else None


def _remedies(found: OutOfMemory, cause: Cause) -> str:
    listed = "\n".join(f"- {hint}" for hint in cause.hints)
    if not found.remedies:
        reason = f"The saving of each feature was not estimated: {found.no_remedies}" if found.no_remedies else ""
        return "\n\n".join(filter(None, (listed, reason or found.cut)))
    table = _table(*cells(_choices(found), "line to paste"))
    note = "Estimated with steps of this run, and the batch that ran out of memory, on fake tensors."
    if any(remedy.fits for remedy in found.remedies):
        note = f"\\* recommended. {note}"
    note += f" {found.cut}" if found.cut else ""
    parts = [table, note, f"Or:\n\n{listed}"] if cause.needs_leaner_step else [listed, table, note]
    return "\n\n".join(parts)


def _choices(found: OutOfMemory) -> list[Choice]:
    """Return this run and its remedies, from the most memory to the least; the best that fits is marked."""
    best = next((remedy for remedy in found.remedies if remedy.fits), None)
    budget_bytes = (
        nan if found.budget_bytes in (None, 1) else found.budget_bytes
    )  # 1: more was asked for than a step has
    most_bytes = max(remedy.needed_bytes + remedy.saved_bytes for remedy in found.remedies)
    rows = [Choice("baseline", most_bytes, most_bytes / budget_bytes, 1.0, "exact", is_plan=False)]
    for one in sorted(found.remedies, key=lambda remedy: -remedy.needed_bytes):
        time = nan if one.time_ratio is None else one.time_ratio
        share = one.needed_bytes / budget_bytes
        rows.append(Choice(f"`{one.code}`", one.needed_bytes, share, time, one.results, is_plan=one is best))
    return rows


def _held(found: OutOfMemory) -> str:
    total = sum(found.by_category.values())
    kinds = [(label(name), size) for name, size in found.by_category.items() if size]
    tables = [_shares("for", kinds, total), _shares("module", list(found.by_module.items())[:_MOST_MODULES], total)]
    return "\n\n".join(filter(None, tables))


def _shares(head: str, sizes: Iterable[tuple[str, int]], total: int) -> str:
    rows = [(name or "(none)", format_bytes(size), f"{size / total:.0%}") for name, size in sizes]
    return _table((head, "bytes", "share"), *rows) if rows else ""


def _growth(found: OutOfMemory) -> str:
    if len(found.growth) < 2:
        return ""
    step = max(1, len(found.growth) // _MOST_READINGS)
    rows = [(str(batch), format_bytes(size)) for batch, size in found.growth[::-1][::step][::-1]]
    return _table(("batch", "in tensors"), *rows)


def _pictures(names: Sequence[str]) -> list[str]:
    drawn = [f"![A step of this run on fake tensors]({name})\n\n{_LIMIT}" for name in names if name.endswith(".png")]
    linked = [f"- [{name}]({name}){_said_of(name)}" for name in names if not name.endswith(".png")]
    return [*drawn, "\n".join(linked)] if linked else drawn


def _said_of(name: str) -> str:
    return ": blocks of the allocator, for https://pytorch.org/memory_viz" if name.endswith(".pickle") else ""


def _table(head: Sequence[str], *rows: Sequence[str]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
