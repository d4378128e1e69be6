"""Replay a tracked step in a GPU's order of allocations, and what its allocator reserves for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from lightning_vram.memory.estimate.caching_allocator import AllocatorSettings, Block, CachingAllocator
from lightning_vram.memory.tracking.timeline import Allocation, MemoryEvent, MemoryTimeline, Phase

_DROPOUT = "aten.native_dropout.default"  # returns its mask second, and makes it first
_SUM = "aten.add.Tensor"


def as_on_gpu(timeline: MemoryTimeline) -> MemoryTimeline:
    """Return a timeline as long, in which dropout makes its mask first and autograd sums gradients in place.

    Autograd adds to a gradient that nobody else holds, but never to a fake one (``can_accumulate_inplace`` of
    torch/csrc/autograd/input_buffer.cpp): there the sum is made before its parts are dropped.
    """
    events = list(timeline.events)
    for index in range(len(events) - 1):
        pair = events[index], events[index + 1]
        if _is_late_mask(timeline, *pair) or _is_sum(timeline, *pair):
            events[index : index + 2] = reversed(pair)
    return replace(timeline, events=tuple(events))


def _is_late_mask(timeline: MemoryTimeline, first: MemoryEvent, second: MemoryEvent) -> bool:
    ops = {timeline.allocations[event.allocation].op for event in (first, second)}
    is_pair = second.allocation == first.allocation + 1 and ops == {_DROPOUT}
    return is_pair and first.change_bytes > second.change_bytes > 0


def _is_sum(timeline: MemoryTimeline, first: MemoryEvent, second: MemoryEvent) -> bool:
    made = timeline.allocations[first.allocation]
    is_autograd = made.op == _SUM and not made.module and first.phase is Phase.BACKWARD
    return is_autograd and 0 < first.change_bytes == -second.change_bytes and first.allocation != second.allocation


@dataclass(frozen=True)
class AllocatorReplay:
    """What the allocator held over a timeline."""

    allocated: tuple[int, ...]  # most bytes in used blocks at each event of the timeline, with scratch of its operator
    reserved: tuple[int, ...]  # bytes taken from the driver, after each event
    peak_allocated_bytes: int  # most bytes in blocks at once: what ``torch.cuda.max_memory_allocated`` would say
    peak_reserved_bytes: int  # most bytes taken from the driver: ``torch.cuda.max_memory_reserved``
    workspace_bytes: int  # most bytes that libraries took at once, in addition to tensors


def replay(
    timeline: MemoryTimeline,
    device: str,
    *,
    settings: AllocatorSettings | None = None,
    persistent: Mapping[str, tuple[int, ...]] | None = None,
    scratch: Mapping[str, int] | None = None,
) -> AllocatorReplay:
    """Replay what a timeline has on one device, of one step or more: the second step stands for all later ones."""
    player = _Player(CachingAllocator(settings), persistent or {}, scratch or {})
    allocated, reserved = [], []
    for event in timeline.events:
        scratch_bytes = 0
        allocation = timeline.allocations[event.allocation]
        if allocation.device == device:
            player.change(event.allocation, event.change_bytes, allocation.stream)
            if event.change_bytes > 0:
                player.take_persistent(allocation, event.phase)
                scratch_bytes = player.use_scratch(allocation)
        allocated.append(player.allocator.statistics.allocated_bytes + scratch_bytes)
        reserved.append(player.allocator.reserved_bytes)
    return AllocatorReplay(
        allocated=tuple(allocated),
        reserved=tuple(reserved),
        peak_allocated_bytes=player.allocator.statistics.peak_allocated_bytes,
        peak_reserved_bytes=player.allocator.device_memory.peak_reserved_bytes,
        workspace_bytes=player.persistent_bytes + player.most_scratch_bytes,
    )


@dataclass(eq=False)
class _Player:
    """Knows which block each allocation has."""

    allocator: CachingAllocator
    persistent: Mapping[str, tuple[int, ...]]  # see Workspaces
    scratch: Mapping[str, int]
    persistent_bytes: int = 0
    most_scratch_bytes: int = 0
    _taken: set[tuple[int, int, bool]] = field(default_factory=set)
    _blocks: dict[int, Block] = field(default_factory=dict)

    def take_persistent(self, allocation: Allocation, phase: Phase) -> None:
        """Allocate what libraries keep from an operator's first run on."""
        for library, num_bytes in enumerate(self.persistent.get(allocation.op, ())):
            key = library, allocation.stream, phase is Phase.BACKWARD
            if key not in self._taken:
                self._taken.add(key)
                self.persistent_bytes += self.allocator.malloc(num_bytes, allocation.stream).size

    def use_scratch(self, allocation: Allocation) -> int:
        """Allocate and free what an operator needs in addition to its result; return how much was in use for it."""
        if not (num_bytes := self.scratch.get(allocation.op, 0)):
            return 0
        block = self.allocator.malloc(num_bytes, allocation.stream)
        allocated_bytes = block.size  # before it grows by free neighbours
        self.allocator.free(block)
        self.most_scratch_bytes = max(self.most_scratch_bytes, allocated_bytes)
        return allocated_bytes

    def change(self, number: int, change_bytes: int, stream: int) -> None:
        """Let an allocation grow or shrink: as a storage does, whose new block is there before the old one is freed."""
        block = self._blocks.pop(number, None)
        num_bytes = change_bytes + (block.requested_bytes if block is not None else 0)
        if num_bytes:
            self._blocks[number] = self.allocator.malloc(num_bytes, stream)
        if block is not None:
            self.allocator.free(block)
