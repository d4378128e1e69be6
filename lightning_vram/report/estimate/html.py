"""The page of an estimate: one file that needs no network and no library, with the values at the pointer."""

import json
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from typing import Any

from lightning_vram.memory.estimate.result import MemoryEstimate
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.estimate import rows
from lightning_vram.report.estimate.step import COLORS, Step, read_step
from lightning_vram.report.estimate.svg import BOTTOM, LEFT, RIGHT, TOP, svg_of
from lightning_vram.report.estimate.words import module_name, operator_name, peak_sentence, verdict
from lightning_vram.report.tables import label

_MAX_MODULES = 40
_TEMPLATE = "page.html"


def page(estimate: MemoryEstimate) -> str:
    """Write an estimate as a page of HTML.

    Args:
        estimate: Its training step is drawn.

    Raises:
        ValueError: If no tensor was on the device.
    """
    step = read_step(estimate.timeline, RIGHT - LEFT, estimate.main_stage.first_event)
    parts = {
        "verdict": escape(verdict(estimate)),
        "color": "good" if estimate.fits else "bad",
        "peak": escape(peak_sentence(estimate)),
        "svg": svg_of(estimate, step),
        "tables": "".join(_tables(estimate)),
        "notes": "".join(f"<p>Note: {escape(note)}</p>" for note in estimate.notes),
        "data": json.dumps(_data(step), separators=(",", ":")).replace("<", "\\u003c"),  # nothing ends the script
    }
    # Split rather than replaced one after the other: what is put in is never read as the name of a part.
    texts = files(__package__).joinpath(_TEMPLATE).read_text(encoding="utf-8").split("{{")
    filled = [parts[name] + rest for name, _, rest in (text.partition("}}") for text in texts[1:])]
    return "".join([texts[0], *filled])


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
    return {"area": [LEFT, TOP, RIGHT, BOTTOM], "categories": categories, "names": list(numbers), "columns": columns}


def _tables(estimate: MemoryEstimate) -> Iterable[str]:
    def with_share(sizes: Iterable[tuple[str, int]]) -> Iterable[tuple[str, ...]]:
        return ((name, format_bytes(size), f"{size / estimate.peak_bytes:.0%}") for name, size in sizes)

    def in_text(sizes: Iterable[tuple[str, int]]) -> Iterable[tuple[str, ...]]:
        return ((name, format_bytes(size)) for name, size in sizes)

    kinds = [(label(category), size) for category, size in rows.categories(estimate)]
    modules = [(module_name(fqn), size) for fqn, size in rows.modules(estimate, _MAX_MODULES)]
    yield _table("tensors at the peak", with_share([*kinds, ("all", estimate.peak_bytes)]))
    yield _table("their peak in", in_text(rows.moments(estimate)))
    yield _table("the process", in_text(rows.process(estimate)))
    yield _table("the run", rows.facts(estimate))
    yield _table("modules at the peak", with_share(modules))


def _table(name: str, lines: Iterable[tuple[str, ...]]) -> str:
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in line)}</tr>" for line in lines)
    return f'<table><tr><th colspan="3">{escape(name)}</th></tr>{body}</table>'
