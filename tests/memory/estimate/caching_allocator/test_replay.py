"""Timelines as the allocator of a card sees them; training steps that PyTorch's own allocator has recorded, replayed.

``recorded_steps.json``: CUDA builds of torch 2.11 and 2.15, a small language model, two steps of other lengths than
the one before the trace. The driver was played: it handed out addresses without memory, and kernels did nothing.
So the allocator, the operators' requests and cuBLAS's workspaces are real; there was no GPU.
"""

import json
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import pytest
from support.allocator_snapshots import replay_snapshot
from support.estimates import allocation, timeline_of

from lightning_vram.memory.estimate.caching_allocator import (
    AllocatorReplay,
    AllocatorSettings,
    as_on_gpu,
    parse_settings,
)
from lightning_vram.memory.estimate.workspaces import Workspaces
from lightning_vram.memory.tracking.timeline import Allocation, Category, MemoryEvent, MemoryTimeline, Phase
from lightning_vram.memory.units import MIB
from tests.benchmarks.trace_text import expand_trace

CARD = "lazy:0"
FORWARD, BACKWARD = Phase.FORWARD, Phase.BACKWARD
CALLS = 12  # of Python functions, for each event


def replay(timeline, device=CARD, settings=None, persistent=None, scratch=None):
    workspaces = Workspaces(0, persistent or {}, scratch or {}, ())
    return AllocatorReplay(replace(timeline, device=device), workspaces, settings or AllocatorSettings())


def make_timeline(*changes, op="aten.mm", phases=None, streams=(0,)):
    """Of (allocation, bytes) or (allocation, bytes, device)."""
    devices = {number: (*rest, CARD)[0] for number, _, *rest in changes}
    allocations = [
        Allocation(op, "", Phase.FORWARD, Category.TEMPORARIES, device, stream=stream)
        for device, stream in zip(devices.values(), cycle(streams), strict=False)
    ]
    phases = phases or [Phase.FORWARD] * len(changes)
    events = [MemoryEvent(number, size, phase) for (number, size, *_), phase in zip(changes, phases, strict=True)]
    return MemoryTimeline(tuple(allocations), tuple(events), (), CARD)


def test_curves_and_peaks_of_a_small_timeline():
    result = replay(make_timeline((0, 1000), (1, 15 * MIB), (0, -1000), (1, -15 * MIB)), CARD)
    assert result.allocated == (1024, 1024 + 16 * MIB, 16 * MIB, 0)  # 15 of 16 MiB: 1 MiB is not split off
    assert result.reserved == (2 * MIB, 18 * MIB, 18 * MIB, 18 * MIB)


def test_only_the_device_counts():
    result = replay(make_timeline((0, 512), (1, 5 * MIB, "cpu"), (0, -512)), CARD)
    assert result.allocated == (512, 512, 0)
    assert replay(make_timeline((0, 512)), "cpu").reserved == (0,)


def test_a_storage_that_grows_has_both_blocks_for_a_moment():
    result = replay(make_timeline((0, 30 * MIB), (0, 10 * MIB), (0, -40 * MIB), (0, 30 * MIB)), CARD)
    assert result.allocated == (30 * MIB, 40 * MIB, 0, 30 * MIB)
    assert result.reserved[-1] == 70 * MIB


def test_workspaces_are_taken_by_the_first_product_of_each_thread_and_stay():
    changes = (0, 2 * MIB), (1, 2 * MIB), (1, -2 * MIB), (2, 2 * MIB), (0, -2 * MIB)
    phases = [Phase.FORWARD, Phase.OPTIMIZER_STEP, Phase.BACKWARD, Phase.BACKWARD, Phase.BACKWARD]
    persistent = {"aten.mm": (8 * MIB, 3 * MIB)}
    result = replay(make_timeline(*changes, phases=phases), CARD, persistent=persistent)
    assert result.allocated == tuple(number * MIB for number in (13, 15, 13, 26, 24))
    assert result.workspace_bytes == 22 * MIB
    assert replay(make_timeline((0, 2 * MIB), op="held"), CARD, persistent=persistent).workspace_bytes == 0


def test_each_stream_has_blocks_and_workspaces_of_its_own():
    changes = (0, 12 * MIB), (0, -12 * MIB), (1, 12 * MIB)
    persistent = {"aten.mm": (8 * MIB,)}
    assert replay(make_timeline(*changes), CARD, persistent=persistent).reserved[-1] == 32 * MIB
    assert replay(make_timeline(*changes, streams=(0, 3)), CARD, persistent=persistent).reserved[-1] == 64 * MIB


def test_scratch_of_an_operator_lies_beside_its_result_and_goes():
    changes = (0, 2 * MIB), (0, -2 * MIB)
    result = replay(make_timeline(*changes), CARD, scratch={"aten.mm": 32 * MIB, "aten.add": 64 * MIB})
    assert result.allocated == (34 * MIB, 0)
    assert result.reserved == (52 * MIB, 52 * MIB)
    assert result.workspace_bytes == 32 * MIB


def orders(ops, changes, module=""):
    made = [allocation(op, module, Category.TEMPORARIES) for op in ops]
    return [event.allocation for event in as_on_gpu(timeline_of(made, changes)).events]


def test_dropout_makes_its_mask_first():
    ops = ["aten.native_dropout.default"] * 2
    assert orders(ops, [(0, 4, FORWARD), (1, 1, FORWARD)]) == [1, 0]


def test_gradients_are_summed_in_place_by_autograd_and_by_nobody_else():
    ops = ["aten.mm.default", "aten.add.Tensor"]
    changes = [(0, 4, BACKWARD), (1, 4, BACKWARD), (0, -4, BACKWARD)]
    assert orders(ops, changes) == [0, 0, 1]
    assert orders(ops, changes, module="net.layer") == [0, 1, 0]  # recomputation
    assert orders(ops, [(0, 4, FORWARD), (1, 4, FORWARD), (0, -4, FORWARD)]) == [0, 1, 0]
    assert orders(ops, [(0, 8, BACKWARD), (1, 4, BACKWARD), (0, -8, BACKWARD)]) == [0, 1, 0]


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
