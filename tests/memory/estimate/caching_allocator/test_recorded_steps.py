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


@pytest.mark.parametrize("row", STEPS, ids=lambda row: f"{row['torch']} {row['settings']}")
def test_cublas_keeps_its_workspace_or_takes_it_for_each_product(row):
    kept = [block for segment in row["start"] for block in segment.split(",") if ":8519680:" in block]
    events = " ".join(row["phases"].values()).split()
    taken = [index for index, event in enumerate(events) if event.endswith(":8519680")]
    if row["torch"].startswith("2.11"):
        assert (len(kept), taken) == (2, [])  # for the threads of the forward and of the backward
    else:
        assert kept == []
        assert len(taken) > 10
        for index in taken:
            number = events[index].removeprefix("+").partition(":")[0]
            assert events[index + 1] == f"-{number}"  # nothing else comes between


def test_other_settings_would_be_noticed():
    row = next(row for row in STEPS if row["settings"] == "")
    segments, entries = expand_trace(row)
    wrong = replay_snapshot(entries, settings=parse_settings("roundup_power2_divisions:2"), segments=segments)
    assert wrong.worst_error * wrong.recorded_peak_bytes > MIB
