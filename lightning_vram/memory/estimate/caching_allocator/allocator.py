"""The caching allocator: what is asked for, what it takes for that, and what it has taken from the driver."""

from bisect import insort
from collections.abc import Hashable
from dataclasses import dataclass

from lightning_vram.memory.estimate.caching_allocator.segments import (
    Block,
    DeviceMemory,
    ExpandableSegments,
    FixedSegments,
    Pool,
)
from lightning_vram.memory.estimate.caching_allocator.settings import MIN_BLOCK, SMALL, AllocatorSettings, round_request


@dataclass(slots=True)
class AllocatorStatistics:
    """Bytes now and at most, as ``torch.cuda.memory_stats`` counts them."""

    requested_bytes: int = 0  # asked for
    allocated_bytes: int = 0  # in blocks that serve requests: ``torch.cuda.memory_allocated``
    peak_requested_bytes: int = 0  # most at once
    peak_allocated_bytes: int = 0  # most at once


class CachingAllocator:
    """Serve requests from cached blocks, and take segments where none fits.

    The time that kernels take is not simulated: a freed block that another stream may still use is free at once.
    Private pools of graphs are another ``stream`` each.
    """

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self.settings = settings or AllocatorSettings()
        self.statistics = AllocatorStatistics()
        self.device_memory = DeviceMemory()
        kind = ExpandableSegments if self.settings.expandable_segments else FixedSegments
        self.segments: ExpandableSegments | FixedSegments = kind(self.device_memory, self.settings)
        self._pools: dict[tuple[Hashable, bool], Pool] = {}
        self._divisions = self.settings.roundup_power2_divisions

    @property
    def reserved_bytes(self) -> int:
        """Taken from the driver: ``torch.cuda.memory_reserved``."""
        return self.device_memory.reserved_bytes

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Where free blocks wait, for each stream two: small and large."""
        return tuple(self._pools.values())

    def malloc(self, num_bytes: int, stream: Hashable = 0) -> Block:
        """Serve a request of ``num_bytes``."""
        if self._divisions or num_bytes < MIN_BLOCK:
            size = round_request(num_bytes, self._divisions)
        else:
            size = (num_bytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK
        is_small = size <= SMALL
        pool = self._pools.get((stream, is_small)) or self.pool_of(stream, is_small=is_small)
        block = self.segments.find(pool, size) or self.segments.grow(pool, size)
        if self._is_to_split(block, size):
            rest = block.split(size)
            rest.is_free = True
            insort(pool.free, (rest.size, rest.address, rest))  # its neighbours are in use
        self.hand_out(block, num_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back."""
        self.request_free(block)
        self.complete_free(block)

    def empty_cache(self) -> None:
        """Give all segments, or pages, back of which nothing is in use."""
        for pool in self._pools.values():
            self.segments.release_all(pool)

    def request_free(self, block: Block) -> None:
        """Do the first half of :meth:`free`: nobody has the block, and it cannot be used again yet."""
        if not block.is_allocated:
            raise ValueError(f"free(block) got a block that is not in use, at {block.address:#x}.")
        block.is_allocated = False
        self.statistics.allocated_bytes -= block.size

    def complete_free(self, block: Block) -> None:
        """Do the second half: the block can be used again."""
        self.statistics.requested_bytes -= block.requested_bytes
        block.pool.put(block)

    def pool_of(self, stream: Hashable, *, is_small: bool) -> Pool:
        """Return the pool of a stream, made if it is new."""
        return self._pools.setdefault((stream, is_small), Pool(stream, is_small=is_small))

    def hand_out(self, block: Block, num_bytes: int) -> None:
        """Count a block, taken out of its pool, as one that serves a request."""
        block.is_allocated = True
        block.requested_bytes = num_bytes
        statistics = self.statistics
        statistics.requested_bytes += num_bytes
        statistics.allocated_bytes += block.size
        statistics.peak_requested_bytes = max(statistics.peak_requested_bytes, statistics.requested_bytes)
        statistics.peak_allocated_bytes = max(statistics.peak_allocated_bytes, statistics.allocated_bytes)

    def _is_to_split(self, block: Block, size: int) -> bool:
        remaining = block.size - size
        if size <= SMALL or self.settings.expandable_segments:
            return remaining >= MIN_BLOCK
        limit = self.settings.max_split_bytes
        return remaining > SMALL and (limit is None or size < limit)
