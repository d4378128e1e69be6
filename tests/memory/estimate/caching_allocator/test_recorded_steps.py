"""Training steps that PyTorch's own allocator has recorded, replayed.

``recorded_steps.json``: CUDA builds of torch 2.11 and 2.15, a small language model, two steps of other lengths than
the one before the trace. The driver was played: it handed out addresses without memory, and kernels did nothing.
So the allocator, the operators' requests and cuBLAS's workspaces are real; there was no GPU.
"""

import json
from pathlib import Path

import pytest
from support.allocator_snapshots import replay_snapshot

from lightning_vram.memory.estimate.caching_allocator import parse_settings
from lightning_vram.memory.units import MIB
from tests.benchmarks.trace_text import expand_trace

STEPS = json.loads((Path(__file__).parent / "recorded_steps.json").read_text())


@pytest.mark.parametrize("row", STEPS, ids=lambda row: f"{row['torch']} {row['settings']}")
def test_a_recorded_step_is_followed_to_the_byte(row):
    segments, entries = expand_trace(row)
    settings = parse_settings(row["settings"])
    result = replay_snapshot(entries, settings=settings, segments=segments)
    assert (result.worst_error, result.num_unknown) == (0, 0)
    assert result.peak_allocated_bytes == row["max_memory_allocated_bytes"]
    assert result.simulated_peak_bytes == row["max_memory_reserved_bytes"]
    assert len(set(result.simulated)) > 5  # it grew on the way


def entry(action, addr=0, size=0, **others):
    return {"action": action, "addr": addr, "size": size, "stream": 0, **others}


def test_a_difference_is_told_as_a_part_of_the_peak():
    result = replay_snapshot([entry("segment_alloc", 0, 40 * MIB), entry("alloc", 0, 5 * MIB), entry("alloc", 64, 1)])
    assert result.worst_error == 0.5
    assert (result.recorded_peak_bytes, result.simulated_peak_bytes) == (40 * MIB, 22 * MIB)
