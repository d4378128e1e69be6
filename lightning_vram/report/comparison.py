"""The same fit with and without what saves memory: did it fit, is it still right, how much slower."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.table import Table
from torch import Tensor

from lightning_vram.memory.device.measurement import Measurement
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.estimate.result import TRAIN, MemoryEstimate, StageEstimate
from lightning_vram.memory.tracking.timeline import Category, MemoryTimeline
from lightning_vram.memory.units import format_bytes
from lightning_vram.report.drawing import BAD, FONT, GOOD, INK, NO_LIMIT, Scale, choose_scale, style_axes
from lightning_vram.report.estimate.pictures import draw_areas, draw_phases, page
from lightning_vram.report.estimate.step import COLORS, CONTEXT_COLOR, Step, read_step
from lightning_vram.report.tables import NOT_KNOWN, add_names, add_numbers, format_seconds, label

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WIDTH, _HEIGHT = 10.0, 3.75  # inches: 12 pt are 13 pixels where a page shows it 800 pixels wide
_LEFT, _GAP, _LEGEND, _ABOVE, _BELOW = 0.72, 0.22, 1.72, 0.83, 0.14  # inches
_NOTE_LINE = 0.19  # inches
_SOFT = "#4d5660"  # of small type
_MAX_COLUMNS = 600
_MIN_SHARE = 0.01  # of the peak, for a row of the legend


@dataclass(frozen=True)
class ShownStep:
    """One step of the picture."""

    name: str
    estimate: MemoryEstimate  # of an estimated step, or of a tracked one: as_estimate
    verdicts: tuple[str, str] = ("within the limit", "above the limit")

    @property
    def has_limit(self) -> bool:
        """Whether the title compares with the memory of the device."""
        return self.estimate.device.memory_bytes < NO_LIMIT


def as_estimate(timeline: MemoryTimeline, limit_bytes: int | None = None, limit_name: str = "limit") -> MemoryEstimate:
    """Return a tracked step in the form of an estimate, with a line to draw at ``limit_bytes``; ``None``: no line."""
    stage = StageEstimate(timeline, *[timeline.peak_bytes] * 3)
    device = DeviceSpec(limit_name, NO_LIMIT if limit_bytes is None else limit_bytes)
    return MemoryEstimate(device, {TRAIN: stage}, batch_size=0)


def draw_steps(steps: Sequence[ShownStep], notes: Sequence[str] = ()) -> "Figure":
    """Draw steps with matplotlib, each as wide as the others."""
    from matplotlib import rc_context  # an extra: not everybody has it
    from matplotlib.figure import Figure

    drawn = [_read(step.estimate) for step in steps]  # raises before anything else does
    scale = choose_scale(*max((one.needed_bytes, one.device.memory_bytes) for one in (step.estimate for step in steps)))
    bottom = _BELOW + 0.1 + _NOTE_LINE * len(notes)
    width = (_WIDTH - _LEFT - _LEGEND - _GAP * (len(steps) - 1)) / len(steps)
    with rc_context(FONT):
        figure = Figure(figsize=(_WIDTH, _HEIGHT), facecolor="white")
        for number, (shown, step) in enumerate(zip(steps, drawn, strict=True)):
            left = _LEFT + number * (width + _GAP)
            size = (width / _WIDTH, (_HEIGHT - bottom - _ABOVE) / _HEIGHT)
            axes = figure.add_axes((left / _WIDTH, bottom / _HEIGHT, *size))
            _draw_step(axes, shown, step, scale, is_first=number == 0, is_last=number == len(steps) - 1)
        _draw_legend(figure, drawn, bottom, has_context=steps[0].estimate.context_bytes > 0)
        figure.text(0.12 / _WIDTH, _BELOW / _HEIGHT, "\n".join(notes), va="bottom", fontsize=11, color=_SOFT)
    return figure


def _draw_step(axes: "Axes", shown: ShownStep, step: Step, scale: Scale, *, is_first: bool, is_last: bool) -> None:
    one = shown.estimate
    axes.set_xlim(0, len(step.columns))
    axes.set_ylim(0, scale.end_bytes)
    axes.set_yticks(scale.ticks, [scale.label(tick) if is_first else "" for tick in scale.ticks])
    axes.set_xticks([])
    style_axes(axes, grid="y", color=_SOFT)
    draw_phases(axes, step, scale)
    for text in axes.texts:
        text.set(fontsize=11, color=_SOFT, text=text.get_text().removeprefix("optimizer "))
    draw_areas(axes, step, one.context_bytes)
    title, color = f"{shown.name}: {format_bytes(one.needed_bytes)}", INK
    if shown.has_limit:
        title += f"\n{shown.verdicts[not one.fits]}"
        color = GOOD if one.fits else BAD
    axes.set_title(title, loc="left", color=color, fontweight="bold", fontsize=14, pad=19)
    if is_first:
        axes.set_ylabel(f"GPU memory, {scale.unit}" if one.context_bytes else f"memory, {scale.unit}", color=INK)
    if scale.has_limit:
        axes.axhline(one.device.memory_bytes, color=BAD, linewidth=2)
        if is_last:
            place: dict[str, Any] = {"xytext": (5, 4), "textcoords": "offset points", "fontweight": "bold"}
            words = f"{one.device.name}: {format_bytes(one.device.memory_bytes)}"
            axes.annotate(words, (0, one.device.memory_bytes), color=BAD, **place)


def _draw_legend(figure: "Figure", steps: Sequence[Step], bottom: float, *, has_context: bool) -> None:
    from matplotlib.patches import Patch

    columns = [column for step in steps for column in step.columns]
    most = {kind: max(column.by_category[kind] for column in columns) for kind in COLORS}
    least = _MIN_SHARE * max(column.live_bytes for column in columns)
    patches = [Patch(color=COLORS[kind], label=label(kind)) for kind in reversed(COLORS) if most[kind] > least]
    if has_context:
        patches.append(Patch(color=CONTEXT_COLOR, label="CUDA context"))
    place = ((_WIDTH - _LEGEND + 0.08) / _WIDTH, (bottom - 0.06) / _HEIGHT)
    style: dict[str, Any] = {"frameon": False, "fontsize": 11.5, "handlelength": 0.9, "handletextpad": 0.5}
    figure.legend(handles=patches, loc="lower left", bbox_to_anchor=place, borderpad=0, borderaxespad=0, **style)


def _read(estimate: MemoryEstimate) -> Step:
    return read_step(estimate.timeline, _MAX_COLUMNS, estimate.main_stage.first_event)


def write_step(timeline: MemoryTimeline, budget_bytes: int | None, batch_size: int, path: Path) -> None:
    """Write a page with the live bytes of a step, stacked, under its budget. A ``batch_size`` of 0 is unknown."""
    estimate = replace(as_estimate(timeline, budget_bytes, "budget"), batch_size=batch_size)
    title = f"Peak of the training step: {format_bytes(timeline.peak_bytes)}"
    if budget_bytes is not None:
        title += f", {'within' if estimate.fits else 'above'} the budget of {format_bytes(budget_bytes)}"
    path.write_text(page(estimate, title), encoding="utf-8")


OUT_OF_MEMORY = "out of memory"


@dataclass(frozen=True)
class FitResult:
    """What one fit left behind."""

    peak: Measurement | None  # of the highest training batch; None: nothing was measured
    seconds_per_batch: float | None  # median of untracked training batches
    weights: Mapping[str, Tensor] | None  # None: the fit ran out of memory


def describe_equality(one: FitResult, other: FitResult) -> str:
    """Describe whether the weights of two fits are bitwise identical, or how far apart they are."""
    if one.weights is None or other.weights is None:
        return NOT_KNOWN
    if one.weights.keys() != other.weights.keys():
        return f"no: {len(one.weights.keys() ^ other.weights.keys())} names differ"
    differing = [name for name, tensor in one.weights.items() if not torch.equal(tensor, other.weights[name])]
    if not differing:
        return "yes, bit-exact"
    apart = max(float((one.weights[n].double() - other.weights[n].double()).abs().max()) for n in differing)
    return f"no: {len(differing)} of {len(one.weights)} tensors differ, by at most {apart:.1e}"


def comparison_table(baseline: FitResult, optimized: FitResult, parts: str) -> Table:
    """Peak bytes by category, time and equality of two fits, side by side."""
    device = next((f" on {fit.peak.device}" for fit in (optimized, baseline) if fit.peak is not None), "")
    table = Table(
        title=f"Peak memory of a training step{device}: baseline and {parts}",
        title_justify="left",
        caption=f"Final weights equal: {describe_equality(baseline, optimized)}.",
        caption_justify="left",
    )
    add_names(table, "")
    add_numbers(table, "baseline", "with lightning_vram", "ratio")

    def add(name: str, read: Callable[[Measurement], int | None], *, ends_section: bool = False) -> None:
        sizes = [read(fit.peak) if fit.peak is not None else None for fit in (baseline, optimized)]
        if any(size is not None for size in sizes):
            cells = [_cell(fit, size) for fit, size in zip((baseline, optimized), sizes, strict=True)]
            table.add_row(name, *cells, _ratio(*sizes), end_section=ends_section)

    for category in Category:
        add(label(category), lambda peak, category=category: peak.peak_by_category.get(category))  # type: ignore[misc]
    table.add_section()
    is_counted = any(fit.peak is not None and fit.peak.source == "allocator" for fit in (baseline, optimized))
    if is_counted:
        add("all, tracked", lambda peak: sum(peak.peak_by_category.values()) or None)
        add("max_memory_allocated", lambda peak: peak.peak_allocated_bytes)
        add("max_memory_reserved", lambda peak: peak.peak_reserved_bytes, ends_section=True)
    else:
        add("all", lambda peak: peak.peak_allocated_bytes, ends_section=True)
    add("saved for backward", lambda peak: peak.saved_for_backward_bytes, ends_section=True)
    times = baseline.seconds_per_batch, optimized.seconds_per_batch
    table.add_row("time per step", *map(format_seconds, times), _ratio(*times))
    return table


def _cell(fit: FitResult, size: int | None) -> str:
    if size is not None:
        return format_bytes(size)
    return OUT_OF_MEMORY if fit.weights is None else NOT_KNOWN


def _ratio(baseline: float | None, optimized: float | None) -> str:
    return f"{optimized / baseline:.2f}" if baseline and optimized is not None else NOT_KNOWN
