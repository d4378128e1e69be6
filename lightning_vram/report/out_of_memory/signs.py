"""Signs by which causes are distinguished."""

from collections import Counter
from itertools import pairwise

from lightning_vram.memory.tracking.timeline import MemoryTimeline
from lightning_vram.report.out_of_memory.facts import OutOfMemory

_LOSS_FUNCTIONS = ("cross_entropy", "log_softmax", "nll_loss")
_LOSS_OPERATORS = ("aten._log_softmax", "aten.nll_loss")
_BEFORE, _AFTER = 3, 8  # allocations
_LOSS_SHARE = 0.3  # of a peak
_MANY_BATCHES, _MOSTLY = 8, 0.75
_GROWN_SHARE = 0.05  # of what there is


def grown_bytes_per_batch(found: OutOfMemory) -> int | None:
    """Return the bytes by which each of the last batches has left more than the one before; ``None``: no growth."""
    if len(found.growth) < _MANY_BATCHES:
        return None
    sizes = [num_bytes for _, num_bytes in found.growth]
    num_up = sum(after > before for before, after in pairwise(sizes))
    grown_bytes = sizes[-1] - sizes[0]
    room_bytes = found.request.room_bytes or sizes[-1]
    if num_up < _MOSTLY * (len(sizes) - 1) or grown_bytes < _GROWN_SHARE * room_bytes:
        return None
    return grown_bytes // max(1, found.growth[-1][0] - found.growth[0][0])


def is_in_loss(found: OutOfMemory) -> bool:
    """Whether the error was raised in a loss over classes."""
    return found.place.function in _LOSS_FUNCTIONS


def is_mostly_loss(timeline: MemoryTimeline | None) -> bool:
    """Whether logits, in any format, and what the loss makes of them, are a large part of the peak of a step."""
    if timeline is None:
        return False
    sizes: Counter[int] = Counter()
    for event in timeline.events:
        sizes[event.allocation] = max(sizes[event.allocation], event.change_bytes)
    of_loss = [number for number in sizes if timeline.allocations[number].op.startswith(_LOSS_OPERATORS)]
    if not of_loss:
        return False
    logits_bytes = max(sizes[number] for number in of_loss)
    like_logits = {logits_bytes // 2, logits_bytes, 2 * logits_bytes}
    # In order of birth: others may have that size, too, but are not made around the loss.
    around = range(min(of_loss) - _BEFORE, max(of_loss) + _AFTER)
    held_bytes = sum(
        num_bytes
        for number, num_bytes in timeline.peak_allocations.items()
        if number in around and num_bytes in like_logits
    )
    return held_bytes >= _LOSS_SHARE * timeline.peak_bytes
