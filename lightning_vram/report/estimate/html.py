"""The page of an estimate: one file that needs no network and no library, with the values at the pointer."""

import json
from collections.abc import Iterable
from html import escape
from typing import Any

from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.estimate.rows import fact_rows, module_rows, moment_rows, process_rows
from lightning_vram.report.estimate.step import COLORS, Step, read_step
from lightning_vram.report.estimate.svg import BOTTOM, LEFT, MARGIN, TOP, svg_of
from lightning_vram.report.estimate.words import legend_rows, module_name, operator_name, peak_sentence, verdict
from lightning_vram.report.page import WIDTHS, fill, table
from lightning_vram.report.page import page as write_page
from lightning_vram.report.tables import label

_MAX_MODULES = 40


def page(estimate: MemoryEstimate, title: str = "") -> str:
    """Write an estimate as a page of HTML."""
    step = read_step(estimate.timeline, WIDTHS["wide"], estimate.main_stage.first_event)
    data = json.dumps(_data(step), separators=(",", ":")).replace("<", "\\u003c")  # nothing ends the script
    return write_page(
        title or verdict(estimate),
        is_good=estimate.fits,
        lead=peak_sentence(estimate),
        drawing=svg_of(estimate, step),
        side=_categories(estimate, step) + _facts(estimate),
        tables="".join(_tables(estimate)),
        notes="".join(f"<p>Note: {escape(note)}</p>" for note in estimate.notes),
        script=fill("estimate/pointer.html", data=data),
    )


def _data(step: Step) -> dict[str, Any]:
    """What the script shows at the pointer; names that come often stand there once."""
    numbers: dict[str, int] = {}
    columns = [
        [
            *(
                numbers.setdefault(name, len(numbers))
                for name in (label(column.phase), operator_name(column.op), column.module)
            ),
            *(column.by_category[category] for category in step.categories),
        ]
        for column in step.columns
    ]
    categories = [[label(category), COLORS[category]] for category in step.categories]
    return {"area": [LEFT, TOP, MARGIN, BOTTOM], "categories": categories, "names": list(numbers), "columns": columns}


def _categories(estimate: MemoryEstimate, step: Step) -> str:
    legend = legend_rows(estimate, step)
    sizes = [(name, num_bytes) for name, _, num_bytes in legend]
    lines = _with_share(estimate, [*sizes, ("all", estimate.peak_bytes)])
    return table("tensors at the peak", lines, [color for _, color, _ in legend])


def _facts(estimate: MemoryEstimate) -> str:
    facts = fact_rows(estimate)
    return table("the run", facts) if facts else ""


def _tables(estimate: MemoryEstimate) -> Iterable[str]:
    modules = [(module_name(fqn), size) for fqn, size in module_rows(estimate, _MAX_MODULES)]
    yield table("modules at the peak", _with_share(estimate, modules))
    yield table("peak of tensors in each phase", _in_text(moment_rows(estimate)))
    process = process_rows(estimate)
    if len(process) > 1:
        yield table("the process", _in_text(process))


def _with_share(estimate: MemoryEstimate, sizes: Iterable[tuple[str, int]]) -> Iterable[tuple[str, ...]]:
    return ((name, format_bytes(size), f"{size / estimate.peak_bytes:.0%}") for name, size in sizes)


def _in_text(sizes: Iterable[tuple[str, int]]) -> Iterable[tuple[str, ...]]:
    return ((name, format_bytes(size)) for name, size in sizes)
