"""A step's live bytes in columns, and the text and rows that tables and pictures of an estimate share."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from lightning_vram.memory.tracking.ledger import HELD
from lightning_vram.memory.tracking.timeline import Category, MemoryTimeline, Phase

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


def read_peak(timeline: MemoryTimeline) -> Column | None:
    """The highest moment of all; ``None`` if nothing ever was on the timeline's device."""
    return max(_moments(timeline), key=lambda moment: moment.live_bytes, default=None)


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
