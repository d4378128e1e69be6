"""Streams: each has blocks of its own, and a block that another uses waits for it."""

from lightning_vram.memory.estimate.caching_allocator.allocator import CachingAllocator
from lightning_vram.memory.units import MIB


def test_a_freed_block_serves_its_own_stream():
    allocator = CachingAllocator()
    block = allocator.malloc(20 * MIB, stream=1)
    allocator.free(block)
    allocator.malloc(20 * MIB, stream=2)
    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.malloc(20 * MIB, stream=1) is block


def test_a_block_that_another_stream_uses_is_free_when_that_has_done_its_work():
    allocator = CachingAllocator()
    block = allocator.malloc(20 * MIB)
    allocator.record_stream(block, 1)
    allocator.record_stream(block, 2)
    allocator.free(block)
    statistics = allocator.statistics
    assert (statistics.allocated_bytes, statistics.active_bytes, statistics.requested_bytes) == (0, 20 * MIB, 20 * MIB)
    allocator.synchronize(1)
    assert allocator.malloc(20 * MIB) is not block
    allocator.synchronize(2)
    assert allocator.malloc(20 * MIB) is block
    assert (statistics.active_bytes, statistics.peak_active_bytes, allocator.reserved_bytes) == (40 * MIB,) * 3


def test_a_block_that_waits_does_not_become_one_with_its_neighbours():
    allocator = CachingAllocator()
    waiting, behind = allocator.malloc(5 * MIB), allocator.malloc(5 * MIB)
    allocator.record_stream(waiting, 1)
    allocator.free(waiting)
    allocator.free(behind)
    assert [size for size, _, _ in allocator.pools[0].free] == [15 * MIB]
    allocator.synchronize(1)
    assert [size for size, _, _ in allocator.pools[0].free] == [20 * MIB]


def test_the_use_by_its_own_stream_is_no_other_use():
    allocator = CachingAllocator()
    block = allocator.malloc(20 * MIB, stream=3)
    allocator.record_stream(block, 3)
    allocator.free(block)
    assert allocator.statistics.active_bytes == 0


def test_blocks_that_wait_are_waited_for_when_memory_lacks():
    allocator = CachingAllocator(capacity_bytes=30 * MIB)
    block = allocator.malloc(20 * MIB)
    allocator.record_stream(block, 1)
    allocator.free(block)
    allocator.malloc(30 * MIB)
    assert (allocator.reserved_bytes, allocator.statistics.num_retries) == (30 * MIB, 1)
    allocator.synchronize(1)  # it is free already
    assert allocator.statistics.active_bytes == 30 * MIB


def test_a_block_handed_out_again_has_no_users():
    allocator = CachingAllocator()
    block = allocator.malloc(20 * MIB)
    allocator.record_stream(block, 1)
    allocator.free(block)
    allocator.empty_cache()
    block = allocator.malloc(20 * MIB)
    allocator.free(block)
    assert allocator.statistics.active_bytes == 0
