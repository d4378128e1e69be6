"""Segments that the driver gives, cut into blocks: of fixed size, or expandable; and the pools of free blocks."""

from bisect import bisect_left, insort
from collections.abc import Hashable

from lightning_vram.memory.estimate.caching_allocator.settings import (
    MIN_LARGE,
    ROUND_LARGE,
    SMALL,
    SMALL_SEGMENT,
    AllocatorSettings,
    round_up,
)

_ENDLESS = 1 << 50


class DeviceMemory:
    """Memory that the driver has given to this process."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self._next_address = 1 << 30

    def take(self, num_bytes: int) -> None:
        """Reserve memory. The driver is never out of it: callers compare the peak with what a GPU has."""
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def make_addresses(self, num_bytes: int) -> int:
        """Return the start of a range that nobody has: ranges do not touch."""
        address = self._next_address
        self._next_address += num_bytes + (2 << 20)
        return address


class Block:
    """A piece of a segment; its neighbours are the pieces before and behind it."""

    __slots__ = (
        *("address", "size", "pool", "segment_start", "previous", "next"),
        *("is_allocated", "is_free", "is_mapped", "requested_bytes"),
    )

    def __init__(self, address: int, size: int, pool: "Pool", segment_start: int | None = None) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.segment_start = segment_start  # ``None`` in a segment of fixed size
        self.previous: Block | None = None
        self.next: Block | None = None
        self.is_allocated = False
        self.is_free = False  # neither: it was freed, and another stream may still use it
        self.is_mapped = True  # always, but for the empty part of an expandable segment
        self.requested_bytes = 0

    def split(self, size: int) -> "Block":
        """Keep the first ``size`` bytes, and make a block of the rest behind them."""
        rest = Block(self.address + size, self.size - size, self.pool, self.segment_start)
        rest.is_mapped = self.is_mapped
        rest.previous, rest.next = self, self.next
        if rest.next is not None:
            rest.next.previous = rest
        self.next = rest
        self.size = size
        return rest


class Pool:
    """Free blocks of one stream, small or large: the smallest first, and of those the lowest address."""

    __slots__ = ("free", "is_small", "stream", "unmapped")

    def __init__(self, stream: Hashable, *, is_small: bool) -> None:
        self.stream = stream
        self.is_small = is_small
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []  # by address

    def put(self, block: Block) -> None:
        """Take a block in, after it has grown by neighbours that are free too."""
        self._coalesce(block)
        block.is_free = True
        if block.is_mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """Take a block out."""
        block.is_free = False
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def _coalesce(self, block: Block) -> None:
        before = block.previous
        if before is not None and before.is_free and before.is_mapped is block.is_mapped:
            self.remove(before)
            block.address = before.address
            block.size += before.size
            block.previous = before.previous
            if block.previous is not None:
                block.previous.next = block
        behind = block.next
        if behind is not None and behind.is_free and behind.is_mapped is block.is_mapped:
            self.remove(behind)
            block.size += behind.size
            block.next = behind.next
            if block.next is not None:
                block.next.previous = block


class _Segments:
    def __init__(self, device_memory: DeviceMemory, settings: AllocatorSettings) -> None:
        self._device_memory = device_memory
        self._settings = settings

    def _take(self, pool: Pool, index: int, size: int) -> Block | None:
        """Take a free block out of the pool, unless it must be kept for what needs it."""
        block = pool.free[index][2]
        if not self._settings.may_serve(block.size, size):
            return None
        del pool.free[index]
        block.is_free = False
        return block


class FixedSegments(_Segments):
    """Makes segments, one ``cudaMalloc`` each, and gives back those that are free as a whole."""

    def find(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block that serves ``size`` out of the pool."""
        index = bisect_left(pool.free, (size,))
        return self._take(pool, index, size) if index < len(pool.free) else None

    def grow(self, pool: Pool, size: int) -> Block:
        """Make a segment for a block of ``size``."""
        if size <= SMALL:
            num_bytes = SMALL_SEGMENT
        else:
            num_bytes = self._settings.large_segment_bytes if size < MIN_LARGE else round_up(size, ROUND_LARGE)
        self._device_memory.take(num_bytes)
        return Block(self._device_memory.make_addresses(num_bytes), num_bytes, pool)

    def release_all(self, pool: Pool) -> None:
        """Give back all segments of which nothing is in use."""
        for _, _, block in list(pool.free):
            if block.previous is None and block.next is None:
                pool.remove(block)
                self._device_memory.reserved_bytes -= block.size


class ExpandableSegments(_Segments):
    """Maps pages into ranges of addresses, one per pool as a rule, and unmaps those of which nothing is in use."""

    def find(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block for ``size`` out of the pool; one that can grow counts with its full size."""
        free = pool.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        while index + 1 < len(free) and _growable_size(free[index + 1][2]) < _growable_size(free[index][2]):
            index += 1
        return self._take(pool, index, size)

    def grow(self, pool: Pool, size: int) -> Block:
        """Map pages at the lowest address where ``size`` bytes fit."""
        block = self._find_addresses(pool, size)
        if not block.is_mapped:
            self._map(block, min(block.size, size))
        while block.size < size:  # it is free, and what is behind it is not mapped
            unmapped = block.next
            assert unmapped is not None
            self._map(unmapped, min(size - block.size, unmapped.size))
            block = unmapped  # has grown by the block before it
        pool.remove(block)
        return block

    def release_all(self, pool: Pool) -> None:
        """Unmap the pages of which nothing is in use, wherever in the segment they are."""
        for _, _, block in list(pool.free):
            unmapped = self._unmap(block)
            if unmapped is not None and unmapped.previous is None and unmapped.next is None:
                pool.remove(unmapped)  # no page of the segment is mapped: its addresses go as well

    def address_space_bytes(self, pool: Pool) -> int:
        """Return how many addresses a segment has: far more than a GPU has memory, so that some may lie idle."""
        return round_up(_ENDLESS, self._page_bytes(pool))

    def _page_bytes(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool.is_small else self._settings.large_segment_bytes

    def _find_addresses(self, pool: Pool, size: int) -> Block:
        for _, unmapped in pool.unmapped:
            before = unmapped.previous
            block = before if before is not None and before.is_free else unmapped
            free_bytes = 0
            behind: Block | None = block
            while free_bytes < size and behind is not None and behind.is_free:
                free_bytes += behind.size
                behind = behind.next
            if free_bytes >= size:
                return block
        size = self.address_space_bytes(pool)
        start = self._device_memory.make_addresses(size)
        segment = Block(start, size, pool, segment_start=start)
        segment.is_mapped = False
        pool.put(segment)
        return segment

    def _map(self, block: Block, size: int) -> None:
        """Map the first ``size`` bytes of a block and what is left of their last page; it stays free."""
        mapped_bytes = round_up(size, self._page_bytes(block.pool))
        self._device_memory.take(mapped_bytes)
        pool = block.pool
        pool.remove(block)
        if mapped_bytes < block.size:
            pool.put(block.split(mapped_bytes))
        block.is_mapped = True
        pool.put(block)

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
        self._device_memory.reserved_bytes -= last - first
        block.is_mapped = False
        pool.put(block)
        return block


def _growable_size(block: Block) -> int:
    behind = block.next
    return block.size + (behind.size if behind is not None and not behind.is_mapped else 0)
