"""Blocks of memory, and the pools in which free ones wait."""

from bisect import bisect_left, insort
from collections.abc import Hashable


class Block:
    """A piece of a segment; its neighbours are the pieces before and behind it."""

    __slots__ = (
        *("address", "size", "pool", "segment_start", "previous", "next"),
        *("is_allocated", "is_free", "is_mapped", "requested_bytes", "users"),
    )

    def __init__(self, address: int, size: int, pool: "Pool", segment_start: int | None = None) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.segment_start = segment_start
        self.previous: Block | None = None
        self.next: Block | None = None
        self.is_allocated = False
        self.is_free = False  # neither: it was freed, and another stream may still use it
        self.is_mapped = True  # always, but for the empty part of an expandable segment
        self.requested_bytes = 0
        self.users: set[Hashable] | None = None  # other streams that may still use it

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
