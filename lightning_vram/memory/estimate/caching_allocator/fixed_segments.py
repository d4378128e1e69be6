"""Segments of fixed size: one ``cudaMalloc`` each."""

from bisect import bisect_left

from lightning_vram.memory.estimate.caching_allocator.blocks import Block, Pool
from lightning_vram.memory.estimate.caching_allocator.device_memory import DeviceMemory
from lightning_vram.memory.estimate.caching_allocator.settings import AllocatorSettings
from lightning_vram.memory.estimate.caching_allocator.sizes import fixed_segment_bytes


class FixedSegments:
    """Makes segments and gives back those that are free as a whole."""

    def __init__(self, device_memory: DeviceMemory, settings: AllocatorSettings) -> None:
        self._device_memory = device_memory
        self._settings = settings

    def find(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block that serves ``size`` out of the pool."""
        index = bisect_left(pool.free, (size,))
        if index == len(pool.free):
            return None
        block = pool.free[index][2]
        if not self._settings.may_serve(block.size, size):
            return None
        del pool.free[index]
        block.is_free = False
        return block

    def grow(self, pool: Pool, size: int) -> Block | None:
        """Make a segment for a block of ``size``; ``None`` if the driver has no memory for it."""
        num_bytes = fixed_segment_bytes(size, self._settings.large_segment_bytes)
        if not self._device_memory.take(num_bytes):
            return None
        return Block(self._device_memory.make_addresses(num_bytes), num_bytes, pool)

    def release_for(self, pool: Pool, size: int) -> bool:
        """Give back blocks too large to be split, but only as many as ``size`` needs; whether it was enough."""
        limit = self._settings.max_split_bytes
        if limit is None:
            return False
        index = bisect_left(pool.free, (size,))
        if index < len(pool.free):
            self._release(pool.free[index][2])
            return True
        released_bytes = 0
        while released_bytes < size and pool.free and pool.free[-1][0] >= limit:
            released_bytes += pool.free[-1][0]
            self._release(pool.free[-1][2])
        return released_bytes >= size

    def release_all(self, pool: Pool) -> None:
        """Give back all segments of which nothing is in use."""
        for _, _, block in list(pool.free):
            if block.previous is None and block.next is None:
                self._release(block)

    def _release(self, block: Block) -> None:
        block.pool.remove(block)
        self._device_memory.give_back(block.size)
