"""The allocator's rules, each against numbers worked out by hand."""

import pytest

from lightning_vram.memory.estimate.caching_allocator import (
    CachingAllocator,
    parse_settings,
    round_request,
)
from lightning_vram.memory.units import MIB


def make(text=""):
    return CachingAllocator(parse_settings(text))


@pytest.mark.parametrize(("asked", "given"), [(1, 512), (512, 512), (513, 1024), (MIB + 1, MIB + 512)])
def test_requests_are_rounded_to_512_bytes(asked, given):
    allocator = make()
    assert allocator.malloc(asked).size == given
    assert allocator.allocated_bytes == given


@pytest.mark.parametrize(
    ("asked", "reserved"),
    [
        (1, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
        (33 * MIB, 34 * MIB),
    ],
)
def test_segments_are_of_2_or_20_mib_or_of_their_own_size(asked, reserved):
    allocator = make()
    allocator.malloc(asked)
    assert allocator.reserved_bytes == reserved


def test_small_and_large_requests_do_not_share_segments():
    allocator = make()
    allocator.free(allocator.malloc(5 * MIB))
    allocator.malloc(512)
    assert allocator.reserved_bytes == 22 * MIB
    allocator.malloc(MIB)
    assert allocator.reserved_bytes == 22 * MIB  # beside the first in the small segment


def test_a_large_block_is_split_if_more_than_1_mib_is_left():
    allocator = make()
    exact = allocator.malloc(19 * MIB // 2)
    assert exact.size == 19 * MIB // 2  # 10.5 MiB left of 20
    rest = allocator.malloc(19 * MIB // 2)
    assert rest.size == 21 * MIB // 2  # 1 MiB would be left: it stays in the block
    assert allocator.allocated_bytes == allocator.reserved_bytes == 20 * MIB


def test_a_small_block_is_split_if_512_bytes_are_left():
    allocator = make()
    allocator.malloc(MIB)
    assert allocator.malloc(MIB - 512).size == MIB - 512
    assert allocator.malloc(1).size == 512
    assert allocator.reserved_bytes == 2 * MIB


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    allocator = make()
    blocks = [allocator.malloc(size * MIB) for size in (40, 20, 30)]
    for block in blocks:
        allocator.free(block)
    assert allocator.malloc(20 * MIB) is blocks[1]
    assert allocator.malloc(20 * MIB).address == blocks[2].address
    assert allocator.reserved_bytes == 90 * MIB


def test_of_blocks_of_one_size_the_lowest_address_is_taken():
    allocator = make()
    blocks = [allocator.malloc(20 * MIB) for _ in range(3)]
    for block in reversed(blocks):
        allocator.free(block)
    assert [allocator.malloc(20 * MIB).address for _ in range(3)] == [block.address for block in blocks]


def test_free_neighbours_become_one_block():
    allocator = make()
    first, second, third = (allocator.malloc(5 * MIB) for _ in range(3))
    allocator.free(first)
    allocator.free(third)  # and the 5 MiB behind it
    assert sorted(size for size, _, _ in first.pool.free) == [5 * MIB, 10 * MIB]
    allocator.free(second)
    assert [size for size, _, _ in first.pool.free] == [20 * MIB]


def test_blocks_above_max_split_size_are_not_split():
    allocator = make("max_split_size_mb:100")
    allocator.free(allocator.malloc(100 * MIB))
    assert allocator.malloc(50 * MIB).size == 50 * MIB  # a new segment: the large block is kept
    assert allocator.reserved_bytes == 150 * MIB
    with_rounding = make("max_split_size_mb:100")
    with_rounding.free(with_rounding.malloc(120 * MIB))
    assert with_rounding.malloc(102 * MIB).size == 120 * MIB  # within 20 MiB, as a whole
    too_much = make("max_split_size_mb:100")
    too_much.free(too_much.malloc(120 * MIB))
    assert too_much.malloc(100 * MIB).size == 100 * MIB
    assert too_much.reserved_bytes == 220 * MIB


def test_the_rounding_of_blocks_that_are_not_split_can_be_set():
    allocator = make("max_split_size_mb:100,max_non_split_rounding_mb:50")
    allocator.free(allocator.malloc(148 * MIB))
    assert allocator.malloc(100 * MIB).size == 148 * MIB


@pytest.mark.parametrize(
    ("asked", "steps", "given"),
    [
        (1200, 4, 1536),  # not above 512 x 4: to 512 bytes
        (1200 * MIB, 4, 1280 * MIB),  # PyTorch's own example: between 1024 and 2048 in steps of 256
        (1024 * MIB, 4, 1024 * MIB),
        (1025 * MIB, 1, 1025 * MIB),
        (1025 * MIB, 0, 1025 * MIB),
        (5000, 2, 6144),
    ],
)
def test_requests_are_rounded_to_steps_between_powers_of_2(asked, steps, given):
    assert round_request(asked, steps) == given


def test_a_freed_block_serves_its_own_stream():
    allocator = CachingAllocator()
    block = allocator.malloc(20 * MIB, stream=1)
    allocator.free(block)
    allocator.malloc(20 * MIB, stream=2)
    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.malloc(20 * MIB, stream=1) is block
