"""What a search has found, in lines of text: for logs, which have no tables."""

from lightning_vram.memory.host.available import available_host_bytes
from lightning_vram.memory.tracking.timeline import MemoryTimeline, Phase
from lightning_vram.memory.units import format_bytes
from lightning_vram.planner.miss import Ways
from lightning_vram.planner.parts import LEVELS, Exactness
from lightning_vram.planner.search import Found, Measured, as_text, unit_of

_MOST_ROWS = 8


def summary(found: Found, budget_bytes: int) -> str:
    """Return a line for each way that was tried and is worth a look, what is taken first.

    Args:
        found: By the search.
        budget_bytes: What there was.
    """
    rows = [_row(one, found.plain) for one in _worth_a_look(found, budget_bytes)]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines = [f"  {needed:>{widths[0]}}  {ratio:>{widths[1]}}  {scheme}" for needed, ratio, scheme in rows]
    return "\n".join(lines)


def ways_out(least: Measured, level: Exactness, ways: Ways) -> str:
    """Say what would help where nothing fits.

    Args:
        least: What came nearest.
        level: What results might be.
        ways: What was seen to fit.
    """
    told = [f"budget='{as_text(least.needed_bytes + unit_of(least.needed_bytes) - 1)}'"]
    if ways.strategy:
        told.append(f"strategy={ways.strategy!r} ({_on_host(ways.host_bytes)})")
    if ways.num_devices:
        told.append(f"{ways.num_devices} devices with FSDPOffloadStrategy(offload='none')")
    if ways.batch_size:
        told.append(f"a batch of {ways.batch_size} with accumulate_grad_batches")
    if ways.sequence_length:
        told.append(f"sequences of {ways.sequence_length}")
    names = [repr(name) for name, other in LEVELS.items() if other > level]
    if names:
        told.append(f"perhaps allow={' or '.join(names)}")
    return f"What helps: {', or '.join(filter(None, (', '.join(told[:-1]), told[-1])))}."


def where(least: Measured) -> str:
    """Say where its peak is, behind a comma; nothing if nobody knows."""
    return f", {least.peak}" if least.peak else ""


def peak_words(timeline: MemoryTimeline) -> str:
    """Say where the peak of a run is: in which phase, at which operator, and what the largest part is for."""
    if timeline.peak_phase is None:
        return ""
    phase = {Phase.OPTIMIZER_STEP: "optimizer's step"}.get(timeline.peak_phase, str(timeline.peak_phase))
    held = next(((name, size) for name, size in timeline.peak_by_module.items() if name), None)
    largest = "" if held is None else f", the largest part for '{held[0]}' ({format_bytes(held[1])})"
    return f"in the {phase} at {timeline.peak_op}{largest}"


def _on_host(host_bytes: int) -> str:
    """Say what a strategy takes of the host; if the one here has less, what helps there."""
    text, left_bytes = f"about {format_bytes(host_bytes)} of host memory", available_host_bytes()
    if left_bytes is None or host_bytes <= left_bytes:
        return text
    return f"{text}; here are {format_bytes(left_bytes)}: with nvme_path= states lie on a disk"


def _worth_a_look(found: Found, budget_bytes: int) -> list[Measured]:
    """What is taken, the run as it is, and what no other beats: first those that fit."""
    shown = {id(one): one for one in (found.best, found.plain) if one is not None}
    for one in sorted(found.unbeaten, key=lambda one: (one.needed_bytes > budget_bytes, one.seconds)):
        shown.setdefault(id(one), one)
    return list(shown.values())[:_MOST_ROWS]


def _row(one: Measured, plain: Measured) -> tuple[str, str, str]:
    return format_bytes(one.needed_bytes), f"{one.seconds / plain.seconds:.2f}x", str(one.scheme)
