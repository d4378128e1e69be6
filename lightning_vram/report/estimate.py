"""An estimate as people see it: a table, a picture, a page. The numbers know nothing of these: they belong below."""

import json
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text
from typing_extensions import override

from lightning_vram.estimation import estimate_memory as _estimate_memory
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.estimate.result import TRAIN, MemoryEstimate, StageEstimate
from lightning_vram.memory.tracking.timeline import Category, MemoryTimeline, Phase
from lightning_vram.memory.tracking.tracker import HELD
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.drawing import LETTER, WIDTH, Picture, fill, rectangle, text_at, ticks, unit_of
from lightning_vram.report.progress import shown
from lightning_vram.report.tables import Rows, as_text, label

# From the bottom: what stays all along, then what comes and goes. Colours of Okabe and Ito, which people who see
# fewer colours can distinguish as well; two shades of one hue where two kinds belong together.
COLORS = {
    Category.PARAMETERS: "#0072b2",
    Category.BUFFERS: "#7a8fa6",
    Category.OPTIMIZER_STATE: "#56b4e9",
    Category.GRADIENTS: "#009e73",
    Category.INPUTS: "#cc79a7",
    Category.ACTIVATIONS: "#e69f00",
    Category.TEMPORARIES: "#d55e00",
}


class Column(NamedTuple):
    """The highest moment of some events that follow each other."""

    phase: Phase
    op: str  # operator that made the storage which changed
    module: str
    by_category: Mapping[Category, int]  # live bytes right after the event

    @property
    def live_bytes(self) -> int:
        """Of all categories."""
        return sum(self.by_category.values())


class Span(NamedTuple):
    """Columns that follow each other and are of one phase."""

    phase: Phase
    start: int
    end: int  # after the last column
    is_rest: bool = False  # what follows the step, such as zero_grad: it counts as forward


@dataclass(frozen=True)
class Step:
    """What is drawn."""

    columns: tuple[Column, ...]
    spans: tuple[Span, ...]  # without gaps
    peak: int  # index of the highest column
    num_events: int  # that the columns stand for

    @property
    def words(self) -> str:
        """What the axis of time counts."""
        return f"one training step: {self.num_events:,} allocations and frees"

    @property
    def categories(self) -> tuple[Category, ...]:
        """Those that are ever alive, from the bottom."""
        return tuple(kind for kind in COLORS if any(column.by_category[kind] for column in self.columns))


def read_step(timeline: MemoryTimeline, max_columns: int, first_event: int = 0) -> Step:
    """Reduce a timeline to columns, from what was there before the step, in one moment, to the end of the step.

    ``first_event`` is the index of the first event of the step. Raises ``ValueError`` if no tensor was on the device.
    """
    moments = _moments(timeline, first_event)
    if not moments:
        raise ValueError(f"nothing to draw: no tensor was on {timeline.device}.")
    num_columns = min(max_columns, len(moments))
    bounds = [number * len(moments) // num_columns for number in range(num_columns + 1)]
    columns = tuple(max(moments[start:end], key=lambda moment: moment.live_bytes) for start, end in pairwise(bounds))
    peak = max(range(num_columns), key=lambda number: columns[number].live_bytes)
    groups = [list(group) for _, group in groupby(range(num_columns), key=lambda number: columns[number].phase)]
    spans = [Span(columns[group[0]].phase, group[0], group[-1] + 1) for group in groups]
    if len(spans) > 1 and spans[-1].phase is Phase.FORWARD:
        spans[-1] = spans[-1]._replace(is_rest=True)
    return Step(columns, tuple(spans), peak, len(moments))


def _moments(timeline: MemoryTimeline, first_event: int = 0) -> list[Column]:
    live = dict.fromkeys(Category, 0)
    moments: list[Column] = []
    num_held = 0
    for number, event in enumerate(timeline.events):
        allocation = timeline.allocations[event.allocation]
        if allocation.device == timeline.device:
            live = {**live, allocation.category: live[allocation.category] + event.change_bytes}
            moments.append(Column(event.phase, allocation.op, allocation.module, live))
            if number < first_event or (num_held == len(moments) - 1 and allocation.op == HELD):
                num_held = len(moments)
    return moments[max(num_held - 1, 0) :]


def verdict(estimate: MemoryEstimate) -> str:
    """Whether it fits, in one line."""
    device = estimate.device
    sizes = f"{format_bytes(estimate.needed_bytes)} of {format_bytes(device.memory_bytes)} on {device.name}"
    if estimate.fits:
        return f"Fits: {sizes}"
    return f"Does not fit: {sizes}, {format_bytes(estimate.needed_bytes - device.memory_bytes)} too much"


def module_name(fqn: str, max_length: int = 40) -> str:
    """A module's name, the end of a long one, or words for what the root or none made."""
    return (fqn if len(fqn) <= max_length else "..." + fqn[3 - max_length :]) or "(no module)"


# Times what is needed: for words above; a limit beyond it would press the step to the ground.
_HEADROOM, _FAR = 1.2, 2.5
_NUM_TICKS = 7  # at most
_NO_LIMIT = 1 << 62


def axis_bytes(estimate: MemoryEstimate) -> float:
    """Return where the axis of a step ends, which shows what the allocator has: the context is outside of it."""
    needed_bytes, limit = max(estimate.reserved_bytes, estimate.peak_bytes), limit_bytes(estimate)
    return _HEADROOM * (max(needed_bytes, limit) if limit <= _FAR * needed_bytes else needed_bytes)


def limit_bytes(estimate: MemoryEstimate) -> int:
    """What the device has for the allocator."""
    return max(0, estimate.device.memory_bytes - estimate.context_bytes)


def limit_line(estimate: MemoryEstimate) -> str:
    """What the device has for the allocator, as text; empty if there is no limit."""
    if estimate.device.memory_bytes >= _NO_LIMIT:
        return ""
    name = f"{estimate.device.name} minus context" if estimate.context_bytes else estimate.device.name
    return f"{name} {format_bytes(limit_bytes(estimate))}"


def peak_sentence(estimate: MemoryEstimate) -> str:
    """When the peak is, and what makes it."""
    peak = max(_moments(estimate.timeline), key=lambda moment: moment.live_bytes, default=None)
    if peak is None:
        return f"No tensor was on {estimate.timeline.device}."
    where = f" in {module_name(peak.module)}" if peak.module else ""
    made = f"{label(peak.phase)}, made by {peak.op.removesuffix('.default')}{where}"
    return f"The peak of tensors, {format_bytes(estimate.peak_bytes)}, is in the {made}."


def tables_of(estimate: MemoryEstimate, max_modules: int, max_name: int = 40) -> tuple[list[Rows], list[Rows]]:
    """Return tables of the tensors at the peak and of the run, and of modules, phases and the process."""
    timeline, total = estimate.timeline, estimate.peak_bytes

    def rows(name: str, sizes: Iterable[tuple[str, int]], colors: Sequence[str] = (), *, share: bool = False) -> Rows:
        lines = [(one, format_bytes(size), f"{size / max(1, total):.0%}") for one, size in sizes]
        return Rows(name, lines if share else [line[:2] for line in lines], colors)

    found = {one.category for one in timeline.allocations if one.device == timeline.device}
    kinds = [kind for kind in reversed(COLORS) if kind in found]
    sizes = [*((label(kind), estimate.by_category[kind]) for kind in kinds), ("all", total)]
    phases = [(label(phase), num_bytes) for phase, num_bytes in estimate.by_phase.items()]
    phases += [(name, stage.timeline.peak_bytes) for name, stage in estimate.stages.items() if name != TRAIN]
    modules = [(module_name(fqn, max_name), size) for fqn, size in _module_rows(estimate, max_modules)]
    run, process = _fact_rows(estimate), _process_rows(estimate)
    return [
        rows("tensors at the peak", sizes, [COLORS[kind] for kind in kinds], share=True),
        *([Rows("the run", run)] if run else []),
    ], [
        rows("modules at the peak", modules, share=True),
        rows("peak of tensors in each phase", phases),
        *([rows("the process", process)] if process else []),
    ]


def _module_rows(estimate: MemoryEstimate, max_rows: int) -> list[tuple[str, int]]:
    """Bytes at the peak of the modules with the most, by their full names; then those of all others.

    Modules of the same size whose names differ in numbers only are one row, with their sum: ``"net.blocks.*.mlp x8"``.
    """
    alike: dict[tuple[str, int], list[str]] = {}
    for name, num_bytes in estimate.by_module.items():
        alike.setdefault((re.sub(r"(?<![^.])\d+(?![^.])", "*", name), num_bytes), []).append(name)
    groups = sorted(alike.items(), key=lambda group: -group[0][1] * len(group[1]))
    rows = [
        (names[0] if len(names) == 1 else f"{pattern} x{len(names)}", num_bytes * len(names))
        for (pattern, num_bytes), names in groups
    ]
    if len(rows) > max_rows:
        num_others = sum(len(names) for _, names in groups[max_rows - 1 :])
        rows[max_rows - 1 :] = [(f"{num_others} others", sum(size for _, size in rows[max_rows - 1 :]))]
    return rows


def _process_rows(estimate: MemoryEstimate) -> list[tuple[str, int]]:
    """From what tensors ask for to what the driver gives, if these differ: on the host they do not."""
    if estimate.needed_bytes == estimate.peak_bytes:
        return []
    rows = [
        ("requested", estimate.peak_bytes),
        ("allocated", estimate.allocated_bytes),
        ("of it workspaces", estimate.workspace_bytes),
        ("reserved", estimate.reserved_bytes),
        ("reserved, expandable segments", estimate.expandable_reserved_bytes),
        ("context", estimate.context_bytes),
        ("reserved and context", estimate.context_bytes and estimate.needed_bytes),
    ]
    return [row for row in rows if row[1]]


def _fact_rows(estimate: MemoryEstimate) -> list[tuple[str, str]]:
    """Further facts about the run that are known, a line each."""

    def limit(size: int | None, unit: str, refusal: str | None) -> str:
        return "" if size is None else f"{size} {unit}{' (limit: model)' if refusal else ''}"

    rows = [
        ("batch", f"{estimate.batch_size} samples" if estimate.batch_size else ""),
        ("largest batch that fits", limit(estimate.max_batch_size, "samples", estimate.batch_size_refusal)),
        ("longest sequence", limit(estimate.max_sequence_length, "tokens", estimate.sequence_length_refusal)),
        ("ranks", str(estimate.world_size) if estimate.world_size > 1 else ""),
        ("host memory", format_bytes(estimate.host_bytes) if estimate.host_bytes else ""),
        ("of it pinned", format_bytes(estimate.pinned_bytes) if estimate.pinned_bytes else ""),
    ]
    return [row for row in rows if row[1]]


HEIGHT, LEFT, TOP, BOTTOM, MARGIN = 480, 56, 30, 440, 8  # of the area in which is drawn; MARGIN is at its right
_ROW_PIXELS = 19  # of words
_TITLE = 30  # pixels above each of several steps
_MAX_MODULES = 40


def picture(estimate: MemoryEstimate, title: str = "") -> Picture:
    """Draw an estimate."""
    step = _read(estimate)
    data = json.dumps(_data(step), separators=(",", ":")).replace("<", "\\u003c")  # nothing ends the script
    side, tables = tables_of(estimate, _MAX_MODULES)
    return Picture(
        title=title or verdict(estimate),
        is_good=estimate.fits,
        lead=peak_sentence(estimate),
        name=step.words,
        height=HEIGHT,
        drawing=_Drawing(estimate, step, axis_bytes(estimate), WIDTH - MARGIN).elements(),
        side=side,
        tables=tables,
        notes=estimate.notes,
        script=fill("pointer.html", data=data),
    )


def side_by_side(estimates: Mapping[str, MemoryEstimate], title: str, notes: Sequence[str] = ()) -> Picture:
    """Draw steps next to each other, on one scale, by their names."""
    shown = list(estimates.values())
    steps = [_read(estimate) for estimate in shown]
    kinds = [kind for kind in reversed(COLORS) if any(kind in step.categories for step in steps)]
    lines = [(label(kind), *(format_bytes(estimate.by_category[kind]) for estimate in shown)) for kind in kinds]

    drawing, width = "", WIDTH // len(shown)
    for number, (name, estimate, step) in enumerate(zip(estimates, shown, steps, strict=True)):
        words = text_at(LEFT, 0, name, "strong" if estimate.fits else "strong bad")
        drawn = _Drawing(estimate, step, max(map(axis_bytes, shown)), width - MARGIN).elements()
        drawing += f'<g transform="translate({number * width} {_TITLE})">{words}{drawn}</g>'
    return Picture(
        title=title,
        lead="",
        name=title,
        height=HEIGHT + _TITLE,
        drawing=drawing,
        side=[Rows("tensors at the peak", lines, [COLORS[kind] for kind in kinds])],
        notes=notes,
    )


def _read(estimate: MemoryEstimate) -> Step:
    return read_step(estimate.timeline, WIDTH, estimate.main_stage.first_event)


@dataclass(frozen=True)
class _Drawing:
    estimate: MemoryEstimate
    step: Step
    most_bytes: float  # at the end of the axis
    right: int

    def elements(self) -> str:
        parts = (self._phases, self._axis, self._areas, self._lines, self._peak)
        words = text_at((LEFT + self.right) / 2, BOTTOM + 26, self.step.words, "middle faint small")
        return "".join(element for part in parts for element in part()) + words

    def _x(self, column: float) -> float:
        return LEFT + column / len(self.step.columns) * (self.right - LEFT)

    def _y(self, num_bytes: float) -> float:
        return BOTTOM - num_bytes / self.most_bytes * (BOTTOM - TOP)

    def _phases(self) -> Iterable[str]:
        for span in self.step.spans:
            left, right = self._x(span.start), self._x(span.end)
            yield rectangle(left, TOP, right - left, BOTTOM - TOP, f"phase {span.phase}")
            if right - left >= LETTER * len(label(span.phase)) and not span.is_rest:
                yield text_at((left + right) / 2, TOP - 10, label(span.phase), "middle faint")

    def _axis(self) -> Iterable[str]:
        unit_bytes, unit = unit_of(self.most_bytes)
        for number in ticks(0, self.most_bytes / unit_bytes, _NUM_TICKS):
            y = self._y(number * unit_bytes)
            yield f'<path class="grid" d="M{LEFT} {y:.1f}H{self.right}"/>'
            yield text_at(LEFT - 8, y + 5, f"{number:g}", "end")
        yield text_at(LEFT - 8, TOP - 10, unit, "end faint")

    def _areas(self) -> Iterable[str]:
        base = [0] * len(self.step.columns)
        for category in self.step.categories:
            top = [size + column.by_category[category] for size, column in zip(base, self.step.columns, strict=True)]
            yield self._area(base, top, COLORS[category])
            base = top

    def _area(self, low: Sequence[int], high: Sequence[int], color: str) -> str:
        """Between two staircases: along the upper one, and back along the lower one."""
        there = "".join(f"H{self._x(n):.1f}V{self._y(high[n]):.1f}" for n in _changes(high))
        back = "".join(f"H{self._x(n):.1f}V{self._y(low[n - 1]):.1f}" for n in reversed(_changes(low)))
        corner = f"H{self.right}V{self._y(low[-1]):.1f}"
        return f'<path fill="{color}" d="M{LEFT} {self._y(high[0]):.1f}{there}{corner}{back}H{LEFT}Z"/>'

    def _lines(self) -> Iterable[str]:
        """What is reserved and the limit; the words of two close lines stand above both."""
        verdict = "good" if self.estimate.fits else "bad"
        is_right = self.step.peak < len(self.step.columns) / 2  # away from the words at the peak
        x, side = (self.right - 8, "end small") if is_right else (LEFT + 8, "small")
        reserved_bytes, name = self.estimate.reserved_bytes, limit_line(self.estimate)
        lines = []
        if reserved_bytes > self.estimate.peak_bytes:  # where there is no allocator, it takes what tensors have
            lines.append((self._y(reserved_bytes), "needed", f"reserved {format_bytes(reserved_bytes)}", side))
        if limit_bytes(self.estimate) <= self.most_bytes:
            limit = self._y(limit_bytes(self.estimate))
            lines.append((limit, f"limit {verdict}", name, f"{side} strong {verdict}"))
            if not self.estimate.fits:
                yield rectangle(LEFT, TOP, self.right - LEFT, limit - TOP, "beyond")
        elif name:
            yield text_at(x, TOP + 18 + _ROW_PIXELS, f"{name} \N{UPWARDS ARROW}", f"{side} strong {verdict}")
        above = -math.inf
        for y, kind, words, style in sorted(lines):
            yield f'<path class="{kind}" d="M{LEFT} {y:.1f}H{self.right}"/>'
            yield text_at(x, (y if y - above >= _ROW_PIXELS + 6 else above - _ROW_PIXELS) - 6, words, style)
            above = y

    def _peak(self) -> Iterable[str]:
        x, y = self._x(self.step.peak + 0.5), self._y(self.estimate.peak_bytes)
        words = f"peak of tensors {format_bytes(self.estimate.peak_bytes)}"
        half = LETTER * len(words) / 2
        yield f'<path class="pointer" d="M{x:.1f} {y:.1f}V{TOP + 22}"/>'
        yield f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="5"/>'
        yield text_at(min(max(x, LEFT + half), self.right - half), TOP + 17, words, "middle small")


def _changes(sizes: Sequence[int]) -> list[int]:
    """Columns whose size is another than that of the column before."""
    return [number for number, (one, other) in enumerate(pairwise(sizes), 1) if one != other]


def _data(step: Step) -> dict[str, Any]:
    """What the script shows at the pointer; names that come often stand there once."""
    numbers: dict[str, int] = {}
    columns = []
    for column in step.columns:
        names = (label(column.phase), column.op.removesuffix(".default"), column.module)
        sizes = (column.by_category[category] for category in step.categories)
        columns.append([*(numbers.setdefault(name, len(numbers)) for name in names), *sizes])
    categories = [[label(category), COLORS[category]] for category in step.categories]
    return {"area": [LEFT, TOP, MARGIN, BOTTOM], "categories": categories, "names": list(numbers), "columns": columns}


def as_estimate(timeline: MemoryTimeline, limit_bytes: int | None) -> MemoryEstimate:
    """Return a tracked step in the form of an estimate, with a line to draw at ``limit_bytes``; ``None``: no line."""
    device = DeviceSpec("limit", _NO_LIMIT if limit_bytes is None else limit_bytes)
    return MemoryEstimate(device, {TRAIN: StageEstimate(timeline, *[timeline.peak_bytes] * 3)}, batch_size=0)


_TERMINAL_MODULES = 11  # with all others
_TERMINAL_NAME = 27


def estimate_table(estimate: MemoryEstimate) -> RenderableType:
    """Everything in an estimate, in about 30 lines of 100 columns, or more of fewer. It needs no colours."""
    sides = (
        Group(*(Padding(table.terminal(), (0, 0, 1, 0), expand=False) for table in side))
        for side in tables_of(estimate, _TERMINAL_MODULES, _TERMINAL_NAME)
    )
    style = f"bold {'green' if estimate.fits else 'red'}"
    words = [Text(verdict(estimate), style=style), Text(peak_sentence(estimate))]
    # side by side where the terminal is wide enough for both
    return Group(*words, "", Columns(sides, padding=(0, 2)), *(Text(f"Note: {note}") for note in estimate.notes))


@dataclass(frozen=True)
class ShownEstimate(MemoryEstimate):
    """A :class:`MemoryEstimate` whose ``str`` is a table, and which draws itself."""

    @override
    def __str__(self) -> str:
        return as_text(estimate_table(self))

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draw the memory of the training step by category, with the device's limit.

        Args:
            path: File to write: a picture (``.svg``; ``.png`` and ``.pdf`` by matplotlib), or an interactive page
                (``.html``) in one file, with tables.

        Raises:
            ValueError: If the file has another ending, or no tensor was on the device.
            ModuleNotFoundError: If matplotlib is needed and not installed.
        """
        picture(self).write(path)


estimate_memory = shown(_estimate_memory, ShownEstimate)
