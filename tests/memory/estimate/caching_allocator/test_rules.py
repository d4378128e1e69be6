"""The allocator's rules, each against numbers worked out by hand, and its settings in PyTorch's own syntax."""

import re

import pytest

from lightning_vram.memory.estimate.caching_allocator import (
    AllocatorSettings,
    CachingAllocator,
    parse_settings,
    read_settings,
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
        (MIB, 2 * MIB),
        (MIB + 1, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),
    ],
)
def test_segments_are_of_2_or_20_mib_or_of_their_own_size(asked, reserved):
    allocator = make()
    allocator.malloc(asked)
    assert allocator.reserved_bytes == reserved


def test_the_smallest_free_block_that_is_large_enough_is_taken():
    allocator = make()
    blocks = [allocator.malloc(size * MIB) for size in (40, 20, 30, 20)]
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.malloc(20 * MIB) is blocks[1]  # of two the one at the lowest address
    assert allocator.malloc(20 * MIB) is blocks[3]
    assert allocator.malloc(20 * MIB).address == blocks[2].address
    assert allocator.reserved_bytes == 110 * MIB


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
    wider = make("max_split_size_mb:100,max_non_split_rounding_mb:50")
    wider.free(wider.malloc(148 * MIB))
    assert wider.malloc(100 * MIB).size == 148 * MIB


@pytest.mark.parametrize(
    ("asked", "steps", "given"),
    [
        (1200, 4, 1536),  # not above 512 x 4: to 512 bytes
        (1200 * MIB, 4, 1280 * MIB),  # PyTorch's own example: between 1024 and 2048 in steps of 256
        (1024 * MIB, 4, 1024 * MIB),
        (1025 * MIB, 1, 1025 * MIB),
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


def test_all_settings_at_once_with_blanks_and_a_comma_at_the_end():
    text = "expandable_segments:True, max_split_size_mb : 128,large_segment_size_mb:32,roundup_power2_divisions:4,"
    assert parse_settings(text) == AllocatorSettings(
        expandable_segments=True,
        max_split_bytes=128 * MIB,
        large_segment_bytes=32 * MIB,
        max_non_split_rounding_bytes=32 * MIB,
        roundup_power2_divisions=4,
    )


def test_what_has_no_effect_is_left_out():
    text = "backend:native,garbage_collection_threshold:0.8,pinned_use_background_threads:True"
    assert parse_settings(text) == parse_settings("") == AllocatorSettings(max_split_bytes=None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size_mb:19", "max_split_size_mb must be a whole number of MiB from 20 on, got '19'."),
        ("large_segment_size_mb:10", "large_segment_size_mb must be a whole number of MiB from 11 on, got '10'."),
        ("roundup_power2_divisions:[256:2,>:4]", "must be one power of 2, for all sizes, in an estimate, got '[256:2,"),
        ("backend:cudaMallocAsync", "is another allocator than the simulated one, backend:native."),
        ("expandable_segments=True", "must be name:value pairs with commas between, got 'expandable_segments=True'."),
    ],
)
def test_what_pytorch_refuses_is_refused(text, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_settings(text)


def test_the_environment_is_read_the_newer_variable_first():
    old = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert read_settings({}) == AllocatorSettings()
    assert read_settings(old).max_split_bytes == 64 * MIB
    assert read_settings({**old, "PYTORCH_ALLOC_CONF": "expandable_segments:True"}).max_split_bytes is None
