"""Random requests, by any settings: the books are right after each, and all is free at the end. 12,000 in all."""

from bisect import insort
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_vram.memory.estimate.caching_allocator import CachingAllocator, parse_settings

NUM_OPERATIONS, NUM_EXAMPLES = 200, 15
SETTINGS = {
    "fixed": "",
    "no splits, steps": "max_split_size_mb:32,roundup_power2_divisions:4",
    "expandable": "expandable_segments:True",
    "expandable, large pages": "expandable_segments:True,large_segment_size_mb:48,max_split_size_mb:32",
}


class Books:
    """An allocator, and what is known of it from outside."""

    def __init__(self, text):
        self.allocator = CachingAllocator(parse_settings(text))
        self.asked = {}  # block: bytes

    def operate(self, kind, size, choice):
        """One request or free."""
        stream = choice % 2
        if kind < 150:
            exponent = 4 + 22 * size / 255
            block = self.allocator.malloc(int(2**exponent) + choice, stream)
            self.asked[block] = int(2**exponent) + choice
        elif self.asked:
            block = list(self.asked)[choice % len(self.asked)]
            self.allocator.free(block)
            del self.asked[block]

    def chains(self):
        """All segments, as lists of their blocks."""
        blocks = set(self.asked)
        for pool in self.allocator._pools.values():
            blocks |= {block for _, _, block in pool.free}
        heads = []
        for block in blocks:
            if block.previous is None:
                insort(heads, (block.address, block))
        found = []
        for _, block in heads:
            chain = []
            while block is not None:
                chain.append(block)
                block = block.next
            found.append(chain)
        assert sum(map(len, found)) == len(blocks)  # no block is lost, none is in no chain
        return found

    def check(self):
        allocated, reserved = self.allocator.allocated_bytes, self.allocator.reserved_bytes
        assert sum(self.asked.values()) <= allocated == sum(block.size for block in self.asked) <= reserved
        assert all(block.requested_bytes == asked <= block.size for block, asked in self.asked.items())
        chains = self.chains()
        assert sum(block.size for chain in chains for block in chain) == reserved
        for one, other in pairwise(chains):
            assert one[-1].address + one[-1].size <= other[0].address
        for one, other in (pair for chain in chains for pair in pairwise(chain)):
            assert one.address + one.size == other.address
            assert other.previous is one
            assert not (one.is_free and other.is_free)  # they would be one


@pytest.mark.parametrize("name", SETTINGS)
def test_the_books_are_right_after_each_operation(name):
    @settings(max_examples=NUM_EXAMPLES, deadline=None, database=None)
    @given(st.integers(0, 2**32))
    def check(seed):
        data = Random(seed).randbytes(3 * NUM_OPERATIONS)  # hypothesis's own bytes are mostly alike
        books = Books(SETTINGS[name])
        for start in range(0, len(data), 3):
            books.operate(*data[start : start + 3])
            books.check()
        for block in books.asked:
            books.allocator.free(block)
        books.asked.clear()
        books.check()
        assert books.allocator.allocated_bytes == 0
        assert sum(size for pool in books.allocator._pools.values() for size, _, _ in pool.free) == (
            books.allocator.reserved_bytes
        )

    check()
