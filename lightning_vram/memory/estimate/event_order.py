"""Events in the order in which the allocator of a card sees them, where fake tensors make another."""

from dataclasses import replace

from lightning_vram.memory.tracking.timeline import MemoryEvent, MemoryTimeline, Phase

_DROPOUT = "aten.native_dropout.default"  # returns its mask second, and makes it first
_SUM = "aten.add.Tensor"


def as_on_card(timeline: MemoryTimeline) -> MemoryTimeline:
    """Return a timeline as long, in which dropout makes its mask first and autograd sums gradients in place.

    Autograd adds to a gradient that nobody else holds, but never to a tensor without memory
    (``can_accumulate_inplace`` of torch/csrc/autograd/input_buffer.cpp): there it makes the sum, and then drops what
    it was made of. What was dropped first is as good as written to.
    """
    events = list(timeline.events)
    for index in range(len(events) - 1):
        if _is_late_mask(timeline, *events[index : index + 2]) or _is_sum(timeline, *events[index : index + 2]):
            events[index], events[index + 1] = events[index + 1], events[index]
    return replace(timeline, events=tuple(events))


def _is_late_mask(timeline: MemoryTimeline, first: MemoryEvent, second: MemoryEvent) -> bool:
    ops = {timeline.allocations[event.allocation].op for event in (first, second)}
    is_pair = second.allocation == first.allocation + 1 and ops == {_DROPOUT}
    return is_pair and first.change_bytes > second.change_bytes > 0


def _is_sum(timeline: MemoryTimeline, first: MemoryEvent, second: MemoryEvent) -> bool:
    made = timeline.allocations[first.allocation]
    is_autograd = made.op == _SUM and not made.module and first.phase is Phase.BACKWARD
    return is_autograd and 0 < first.change_bytes == -second.change_bytes and first.allocation != second.allocation
