"""Expandable segments: a range of addresses into which pages are mapped where they are needed."""

from bisect import bisect_left

from lightning_vram.memory.estimate.caching_allocator.blocks import Block, Pool
from lightning_vram.memory.estimate.caching_allocator.device_memory import DeviceMemory
from lightning_vram.memory.estimate.caching_allocator.settings import AllocatorSettings
from lightning_vram.memory.estimate.caching_allocator.sizes import SMALL_SEGMENT, round_up

_ENDLESS = 1 << 50


class ExpandableSegments:
    """Maps pages into segments, one per pool as a rule, and unmaps those of which nothing is in use."""

    def __init__(self, device_memory: DeviceMemory, settings: AllocatorSettings) -> None:
        self._device_memory = device_memory
        self._settings = settings

    def find(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block that serves ``size`` out of the pool.

        A block that can grow counts as large as it can become: it is the last that is taken.
        """
        free = pool.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        while index + 1 < len(free) and _growable_size(free[index + 1][2]) < _growable_size(free[index][2]):
            index += 1
        block = free[index][2]
        if not self._settings.may_serve(block.size, size):
            return None
        del free[index]
        block.is_free = False
        return block

    def grow(self, pool: Pool, size: int) -> Block | None:
        """Map pages at the lowest address that has room for ``size``; ``None`` if the driver runs out of them."""
        block = self._find_room(pool, size)
        if not block.is_mapped and not self._map(block, min(block.size, size)):
            self._drop_if_empty(block)
            return None
        while block.size < size:  # it is free, and what is behind it is not mapped
            unmapped = block.next
            assert unmapped is not None
            if not self._map(unmapped, min(size - block.size, unmapped.size)):
                return None  # what was mapped stays as cache
            block = unmapped  # has grown by the block before it
        pool.remove(block)
        return block

    def release_for(self, pool: Pool, size: int) -> bool:
        """Give back nothing: there are no whole segments."""
        return False

    def release_all(self, pool: Pool) -> None:
        """Unmap the pages of which nothing is in use, wherever in the segment they are."""
        for _, _, block in list(pool.free):
            unmapped = self._unmap(block)
            if unmapped is not None:
                self._drop_if_empty(unmapped)

    def address_space_bytes(self, pool: Pool) -> int:
        """Return how many addresses a segment has: more than the card has memory, so that some may lie idle."""
        capacity_bytes = self._device_memory.capacity_bytes
        num_bytes = _ENDLESS if capacity_bytes is None else capacity_bytes + capacity_bytes // 8
        return round_up(num_bytes, self._page_bytes(pool))

    def _page_bytes(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool.is_small else self._settings.large_segment_bytes

    def _find_room(self, pool: Pool, size: int) -> Block:
        for _, unmapped in pool.unmapped:
            before = unmapped.previous
            block = before if before is not None and before.is_free else unmapped
            room = 0
            behind: Block | None = block
            while room < size and behind is not None and behind.is_free:
                room += behind.size
                behind = behind.next
            if room >= size:
                return block
        size = self.address_space_bytes(pool)
        start = self._device_memory.make_addresses(size)
        segment = Block(start, size, pool, segment_start=start)
        segment.is_mapped = False
        pool.put(segment)
        return segment

    def _drop_if_empty(self, unmapped: Block) -> None:
        """Give back the addresses of a segment of which no page is mapped."""
        if unmapped.previous is None and unmapped.next is None:
            unmapped.pool.remove(unmapped)

    def _map(self, block: Block, size: int) -> bool:
        """Map the first ``size`` bytes of a block and what is left of their last page; it stays free."""
        mapped_bytes = round_up(size, self._page_bytes(block.pool))
        if not self._device_memory.take(mapped_bytes):
            return False
        pool = block.pool
        pool.remove(block)
        if mapped_bytes < block.size:
            pool.put(block.split(mapped_bytes))
        block.is_mapped = True
        pool.put(block)
        return True

    def _unmap(self, block: Block) -> Block | None:
        """Unmap the whole pages of a free block, and return them as a block; ``None`` if there are none."""
        start, page = block.segment_start or 0, self._page_bytes(block.pool)
        first = start + round_up(block.address - start, page)
        last = start + (block.address + block.size - start) // page * page
        if first >= last:
            return None
        pool = block.pool
        pool.remove(block)
        if first > block.address:
            front, block = block, block.split(first - block.address)
            pool.put(front)
        if last < block.address + block.size:
            pool.put(block.split(last - block.address))
        self._device_memory.give_back(last - first)
        block.is_mapped = False
        pool.put(block)
        return block


def _growable_size(block: Block) -> int:
    behind = block.next
    return block.size + (behind.size if behind is not None and not behind.is_mapped else 0)
