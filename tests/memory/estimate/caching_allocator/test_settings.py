"""PyTorch's own syntax, and what it refuses."""

import re

import pytest

from lightning_vram.memory.estimate.caching_allocator import AllocatorSettings, parse_settings, read_settings
from lightning_vram.memory.units import MIB


def test_defaults_are_pytorchs():
    assert parse_settings("") == parse_settings("backend:native") == AllocatorSettings()
    assert AllocatorSettings().max_split_bytes is None


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
    text = "garbage_collection_threshold:0.8,pinned_use_background_threads:True"
    assert parse_settings(text) == AllocatorSettings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_split_size_mb:19", "max_split_size_mb must be a whole number of MiB from 20 on, got '19'."),
        ("large_segment_size_mb:10", "large_segment_size_mb must be a whole number of MiB from 11 on, got '10'."),
        ("max_split_size_mb:x", "max_split_size_mb must be a whole number of MiB from 20 on, got 'x'."),
        (
            "roundup_power2_divisions:3",
            "roundup_power2_divisions must be one power of 2, for all sizes, in an estimate, got '3'.",
        ),
        (
            "roundup_power2_divisions:[256:2,>:4]",
            "roundup_power2_divisions must be one power of 2, for all sizes, in an estimate, got '[256:2,>:4]'.",
        ),
        (
            "backend:cudaMallocAsync",
            "backend:cudaMallocAsync is another allocator than the simulated one, backend:native.",
        ),
        (
            "expandable_segments=True",
            "the allocator's settings must be name:value pairs with commas between, got 'expandable_segments=True'.",
        ),
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
