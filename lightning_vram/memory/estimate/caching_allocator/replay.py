"""A tracked step, replayed through the allocator: what it would reserve."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from lightning_vram.memory.estimate.caching_allocator.allocator import CachingAllocator
from lightning_vram.memory.estimate.caching_allocator.blocks import Block
from lightning_vram.memory.estimate.caching_allocator.settings import AllocatorSettings
from lightning_vram.memory.tracking.timeline import Allocation, MemoryTimeline, Phase


@dataclass(frozen=True)
class AllocatorReplay:
    """What the allocator held over a timeline."""

    # most bytes in blocks that are in use at each event of the timeline, with scratch of its operator
    allocated: tuple[int, ...]
    reserved: tuple[int, ...]  # bytes taken from the driver, after each event
    peak_requested_bytes: int  # most bytes that were asked for at once, workspaces among them
    peak_allocated_bytes: int  # most bytes in blocks at once: what ``torch.cuda.max_memory_allocated`` would say
    peak_reserved_bytes: int  # most bytes taken from the driver: ``torch.cuda.max_memory_reserved``
    workspace_bytes: int  # most bytes that libraries took at once, beside tensors
    num_retries: int  # how often all cache had to be given back
    # index of the event that there was no memory for; the curves end before it. ``None``: all went well
    out_of_memory_event: int | None

    @property
    def fragmentation_bytes(self) -> int:
        """Bytes that were reserved and not in use when the most were in use."""
        if not self.allocated:
            return 0
        peak = max(range(len(self.allocated)), key=self.allocated.__getitem__)
        return self.reserved[peak] - self.allocated[peak]


def replay(
    timeline: MemoryTimeline,
    device: str,
    *,
    settings: AllocatorSettings | None = None,
    kept: Mapping[str, tuple[int, ...]] | None = None,
    scratch: Mapping[str, int] | None = None,
    capacity_bytes: int | None = None,
) -> AllocatorReplay:
    """Replay what a timeline has on one device.

    Args:
        timeline: Of :func:`lightning_vram.track_memory`, of one step or more. The second step is as all later ones.
        device: As in :attr:`MemoryTimeline.devices`.
        settings: Of the allocator. ``None`` takes PyTorch's defaults.
        kept: Blocks that libraries take for good when an operator, by its name, has first made its result: each once
            for a stream in the thread of the forward, and once in that of the backward.
        scratch: Bytes that an operator, by its name, takes while it makes its result, and gives back.
        capacity_bytes: What the allocator can take from the driver. ``None`` is without end.

    Example:
        >>> from lightning_vram import track_memory
        >>> with track_memory() as tracker:
        ...     ones = torch.ones(1000)
        >>> result = replay(tracker.timeline, "cpu")
        >>> result.peak_requested_bytes, result.peak_allocated_bytes, result.peak_reserved_bytes
        (4000, 4096, 2097152)
    """
    player = _Player(CachingAllocator(settings, capacity_bytes=capacity_bytes), kept or {}, scratch or {})
    allocated, reserved = [], []
    failed = None
    for index, event in enumerate(timeline.events):
        scratch_bytes = 0
        allocation = timeline.allocations[event.allocation]
        if allocation.device == device:
            try:
                player.change(event.allocation, event.change_bytes, allocation.stream)
                if event.change_bytes > 0:
                    player.take_kept(allocation, event.phase)
                    scratch_bytes = player.use_scratch(allocation)
            except torch.OutOfMemoryError:
                failed = index
                break
        allocated.append(player.allocator.statistics.allocated_bytes + scratch_bytes)
        reserved.append(player.allocator.reserved_bytes)
    statistics = player.allocator.statistics
    return AllocatorReplay(
        allocated=tuple(allocated),
        reserved=tuple(reserved),
        peak_requested_bytes=statistics.peak_requested_bytes,
        peak_allocated_bytes=statistics.peak_allocated_bytes,
        peak_reserved_bytes=player.allocator.peak_reserved_bytes,
        workspace_bytes=player.kept_bytes + player.most_scratch_bytes,
        num_retries=statistics.num_retries,
        out_of_memory_event=failed,
    )


class _Player:
    """Knows which block each allocation has."""

    def __init__(
        self, allocator: CachingAllocator, kept: Mapping[str, tuple[int, ...]], scratch: Mapping[str, int]
    ) -> None:
        self.allocator = allocator
        self._kept = kept
        self._taken: set[tuple[int, int, bool]] = set()
        self._scratch = scratch
        self.kept_bytes = self.most_scratch_bytes = 0
        self._blocks: dict[int, Block] = {}

    def take_kept(self, allocation: Allocation, phase: Phase) -> None:
        """Allocate what libraries keep from an operator's first run on."""
        for library, num_bytes in enumerate(self._kept.get(allocation.op, ())):
            key = library, allocation.stream, phase is Phase.BACKWARD
            if key not in self._taken:
                self._taken.add(key)
                self.kept_bytes += self.allocator.malloc(num_bytes, allocation.stream).size

    def use_scratch(self, allocation: Allocation) -> int:
        """Allocate and free what an operator needs beside its result; return how much was in use for it."""
        if not (num_bytes := self._scratch.get(allocation.op, 0)):
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
