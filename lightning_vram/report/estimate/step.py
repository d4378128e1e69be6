"""A step's live bytes in columns, and the text and rows that tables and pictures of an estimate share."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from lightning_vram.memory.estimate.result import TRAIN, MemoryEstimate
from lightning_vram.memory.tracking.timeline import Category, MemoryTimeline, Phase
from lightning_vram.memory.tracking.tracker import HELD
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.drawing import NO_LIMIT, Scale, choose_scale
from lightning_vram.report.tables import label

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
CONTEXT_COLOR = "#b8bcc2"


@dataclass(frozen=True)
class Column:
    """The highest moment of some events that follow each other."""

    event: int  # index among the device's events, those before the step counted
    phase: Phase
    op: str  # operator that made the storage which changed
    module: str
    by_category: Mapping[Category, int]  # live bytes right after the event

    @property
    def live_bytes(self) -> int:
        """Of all categories."""
        return sum(self.by_category.values())


@dataclass(frozen=True)
class Span:
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
    return Step(columns, _spans(columns), peak, len(moments))


def _moments(timeline: MemoryTimeline, first_event: int = 0) -> list[Column]:
    live = dict.fromkeys(Category, 0)
    moments: list[Column] = []
    num_held = 0
    for number, event in enumerate(timeline.events):
        allocation = timeline.allocations[event.allocation]
        if allocation.device == timeline.device:
            live = {**live, allocation.category: live[allocation.category] + event.change_bytes}
            moments.append(Column(len(moments), event.phase, allocation.op, allocation.module, live))
            if number < first_event or (num_held == len(moments) - 1 and allocation.op == HELD):
                num_held = len(moments)
    return moments[max(num_held - 1, 0) :]


def _spans(columns: tuple[Column, ...]) -> tuple[Span, ...]:
    starts = [0, *(number for number in range(1, len(columns)) if columns[number].phase != columns[number - 1].phase)]
    ends = [*starts[1:], len(columns)]
    last = starts[-1] if len(starts) > 1 and columns[-1].phase is Phase.FORWARD else None
    return tuple(Span(columns[start].phase, start, end, start == last) for start, end in zip(starts, ends, strict=True))


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


def operator_name(op: str) -> str:
    """An operator as people know it: ``"aten.mm.default"`` -> ``"aten.mm"``."""
    return op.removesuffix(".default")


def step_scale(estimate: MemoryEstimate) -> Scale:
    """The axis of a training step, which shows what the allocator has: the context is outside of it."""
    needed_bytes = max(estimate.reserved_bytes, estimate.peak_bytes)
    return choose_scale(needed_bytes, limit_bytes(estimate), headroom=1.2)  # three rows of words


def limit_bytes(estimate: MemoryEstimate) -> int:
    """What the device has for the allocator."""
    return max(0, estimate.device.memory_bytes - estimate.context_bytes)


def limit_line(estimate: MemoryEstimate) -> str:
    """What the device has for the allocator, as text; empty if there is no limit."""
    if estimate.device.memory_bytes >= NO_LIMIT:
        return ""
    name = f"{estimate.device.name} minus context" if estimate.context_bytes else estimate.device.name
    return f"{name} {format_bytes(limit_bytes(estimate))}"


def reserved_line(estimate: MemoryEstimate) -> str:
    """What the allocator takes, as text; empty if that is the peak of tensors, as where there is no allocator."""
    is_more = estimate.reserved_bytes > estimate.peak_bytes
    return f"reserved {format_bytes(estimate.reserved_bytes)}" if is_more else ""


def step_words(step: Step) -> str:
    """What the axis of time counts."""
    return f"one training step: {step.num_events:,} allocations and frees"


def peak_line(estimate: MemoryEstimate) -> str:
    """How high the peak is."""
    return f"peak of tensors {format_bytes(estimate.peak_bytes)}"


def peak_sentence(estimate: MemoryEstimate) -> str:
    """When the peak is, and what makes it."""
    peak = max(_moments(estimate.timeline), key=lambda moment: moment.live_bytes, default=None)
    if peak is None:
        return f"No tensor was on {estimate.timeline.device}."
    where = f" in {module_name(peak.module)}" if peak.module else ""
    made = f"made by {operator_name(peak.op)}{where}"
    return f"The peak of tensors, {format_bytes(estimate.peak_bytes)}, is in the {label(peak.phase)}, {made}."


def legend_rows(estimate: MemoryEstimate, step: Step) -> tuple[tuple[str, str, int], ...]:
    """Name, colour and bytes at the peak of each area, from the top."""
    return tuple((label(kind), COLORS[kind], estimate.by_category[kind]) for kind in reversed(step.categories))


def category_rows(estimate: MemoryEstimate) -> tuple[tuple[Category, int], ...]:
    """Bytes at the peak of what is alive there."""
    return tuple((category, num_bytes) for category, num_bytes in estimate.by_category.items() if num_bytes)


def module_rows(estimate: MemoryEstimate, max_rows: int) -> tuple[tuple[str, int], ...]:
    """Bytes at the peak of the modules with the most, by their full names; then those of all others.

    Modules of the same size whose names differ in numbers only are one row, with their sum: ``"net.blocks.*.mlp x8"``.
    """
    alike: dict[tuple[str, int], list[str]] = {}
    for name, num_bytes in estimate.by_module.items():
        alike.setdefault((re.sub(r"(?<![^.])\d+(?![^.])", "*", name), num_bytes), []).append(name)
    found = [
        (names[0] if len(names) == 1 else f"{pattern} x{len(names)}", num_bytes * len(names), len(names))
        for (pattern, num_bytes), names in alike.items()
    ]
    found.sort(key=lambda row: -row[1])
    if len(found) > max_rows:
        rest = found[max_rows - 1 :]
        num_rest = sum(num_modules for *_, num_modules in rest)
        found = [*found[: max_rows - 1], (f"{num_rest} others", sum(num_bytes for _, num_bytes, _ in rest), num_rest)]
    return tuple((name, num_bytes) for name, num_bytes, _ in found)


def moment_rows(estimate: MemoryEstimate) -> tuple[tuple[str, int], ...]:
    """Most bytes of tensors in each phase of training, and in the other stages."""
    phases = [(label(phase), num_bytes) for phase, num_bytes in estimate.by_phase.items()]
    others = [(name, stage.timeline.peak_bytes) for name, stage in estimate.stages.items() if name != TRAIN]
    return (*phases, *others)


def process_rows(estimate: MemoryEstimate) -> tuple[tuple[str, int], ...]:
    """From what tensors ask for to what the driver gives, as far as these differ: on the host they do not."""
    if estimate.needed_bytes == estimate.peak_bytes:
        return (("requested", estimate.peak_bytes),)
    rows = [
        ("requested", estimate.peak_bytes),
        ("allocated", estimate.allocated_bytes),
        ("of it workspaces", estimate.workspace_bytes),
        ("reserved", estimate.reserved_bytes),
        ("reserved, expandable segments", estimate.expandable_reserved_bytes),
    ]
    if estimate.context_bytes:
        rows += [("context", estimate.context_bytes), ("reserved and context", estimate.needed_bytes)]
    return tuple((name, num_bytes) for name, num_bytes in rows if num_bytes)


def fact_rows(estimate: MemoryEstimate) -> tuple[tuple[str, str], ...]:
    """Further facts about the run that are known, a line each."""
    found = [("batch", f"{estimate.batch_size} samples")] if estimate.batch_size else []
    for name, size, unit, refusal in (
        ("largest batch that fits", estimate.max_batch_size, "samples", estimate.batch_size_refusal),
        ("longest sequence", estimate.max_sequence_length, "tokens", estimate.sequence_length_refusal),
    ):
        if size is not None:
            found.append((name, f"{size} {unit}{' (limit: model)' if refusal else ''}"))
    if estimate.world_size > 1:
        found.append(("ranks", str(estimate.world_size)))
    if estimate.host_bytes:
        found.append(("host memory", format_bytes(estimate.host_bytes)))
    if estimate.pinned_bytes:
        found.append(("of it pinned", format_bytes(estimate.pinned_bytes)))
    return tuple(found)
