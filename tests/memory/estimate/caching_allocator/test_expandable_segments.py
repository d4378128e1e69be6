"""Segments that grow, against numbers worked out by hand."""

from lightning_vram.memory.estimate.caching_allocator import AllocatorSettings, CachingAllocator
from lightning_vram.memory.units import MIB


def make(**settings):
    return CachingAllocator(AllocatorSettings(expandable_segments=True, **settings))


def test_pages_are_mapped_as_they_are_needed():
    allocator = make()
    allocator.malloc(5 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    allocator.malloc(30 * MIB)  # 15 MiB are there, one page more
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (40 * MIB, 35 * MIB)
    allocator.malloc(1)
    assert allocator.reserved_bytes == 42 * MIB  # small ones have a segment of their own, with pages of 2 MiB


def test_every_rest_of_512_bytes_is_split_off():
    allocator = make()
    assert allocator.malloc(20 * MIB - 512).size == 20 * MIB - 512
    allocator.malloc(2 * MIB)
    assert allocator.reserved_bytes == 40 * MIB


def test_memory_freed_in_one_size_serves_another():
    sizes = [30, 50]
    allocator, fixed = make(), CachingAllocator()
    for one in (allocator, fixed):
        for block in [one.malloc(size * MIB) for size in sizes]:
            one.free(block)
        one.malloc(80 * MIB)
    assert (allocator.reserved_bytes, fixed.reserved_bytes) == (80 * MIB, 160 * MIB)


def test_a_block_that_can_grow_is_the_last_to_be_taken():
    allocator = make()
    hole, _, tail = allocator.malloc(30 * MIB), allocator.malloc(2 * MIB), allocator.malloc(20 * MIB)
    allocator.free(hole)
    allocator.free(tail)  # 28 MiB free behind it, with what was left of its page: smaller than the hole
    assert allocator.reserved_bytes == 60 * MIB
    assert allocator.malloc(20 * MIB).address == hole.address
