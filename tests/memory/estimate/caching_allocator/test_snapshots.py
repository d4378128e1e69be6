"""Traces in the form of ``torch.cuda.memory._snapshot()``: by hand, and recorded of the simulated allocator itself."""

from random import Random

import pytest
from support.allocator_snapshots import replay_snapshot, restore

from lightning_vram.memory.estimate.caching_allocator import CachingAllocator, parse_settings
from lightning_vram.memory.units import MIB
from tests.benchmarks.trace_text import expand_trace, reduce_trace

SETTINGS = ["", "expandable_segments:True", "expandable_segments:True,large_segment_size_mb:32"]


class Recorder:
    """An allocator that writes down what it does, as CUDA's does."""

    def __init__(self, text):
        self.allocator = CachingAllocator(parse_settings(text))
        self.trace = []
        self.living = []

    def run(self, random, num_operations):
        for _ in range(num_operations):
            reserved = self.allocator.reserved_bytes
            kind = random.random()
            if kind < 0.5:
                asked = int(2 ** random.uniform(4, 26))
                block = self.allocator.malloc(asked, random.randrange(2))
                self._note_segments(reserved)
                self._note("alloc", block, asked)
                self.living.append(block)
            elif kind < 0.98 and self.living:
                block = self.living.pop(random.randrange(len(self.living)))
                self._note("free_requested", block, block.requested_bytes)
                self.allocator.request_free(block)
                if random.random() < 0.1:
                    self._note("snapshot", block, 0)  # somebody looked
                self._note("free_completed", block, block.requested_bytes)
                self.allocator.complete_free(block)
            elif kind >= 0.98:
                self.allocator.empty_cache()
                self._note_segments(reserved)

    def _note(self, action, block, size):
        self.trace.append({"action": action, "addr": block.address, "size": size, "stream": block.pool.stream})

    def _note_segments(self, before):
        change = self.allocator.reserved_bytes - before
        for action, size in (("segment_alloc", change), ("segment_free", -change)):
            if size > 0:
                self.trace.append({"action": action, "addr": 0, "size": size, "stream": 0})

    def segments(self):
        """As in a snapshot: what is mapped, in pieces."""
        blocks = set(self.living)
        for pool in self.allocator.pools:
            blocks |= {block for _, _, block in pool.free}
        found = []
        for head in (one for one in blocks if one.previous is None or not one.previous.is_mapped):
            chain, block = [], head
            while block is not None and block.is_mapped:
                state = "active_allocated" if block.is_allocated else "inactive"
                chain.append(
                    {
                        "address": block.address,
                        "size": block.size,
                        "requested_size": block.requested_bytes,
                        "state": state,
                    }
                )
                block = block.next
            found.append(
                {
                    "address": head.address,
                    "total_size": sum(one["size"] for one in chain),
                    "stream": head.pool.stream,
                    "segment_type": "small" if head.pool.is_small else "large",
                    "segment_pool_id": (0, 0),
                    "is_expandable": head.segment_start is not None,
                    "blocks": chain,
                }
            )
        return found


def entry(action, addr=0, size=0, **others):
    return {"action": action, "addr": addr, "size": size, "stream": 0, **others}


def test_a_trace_by_hand():
    result = replay_snapshot(
        [
            entry("segment_alloc", 0, 20 * MIB),
            entry("alloc", 0, 5 * MIB),
            entry("alloc", 5 * MIB, 5 * MIB),
            entry("free_requested", 0, 5 * MIB),
            entry("segment_alloc", 1 << 30, 16 * MIB),
            entry("alloc", 1 << 30, 16 * MIB),
            entry("free_completed", 0, 5 * MIB),
            entry("oom", 0, 1 << 40),
        ]
    )
    assert result.recorded == result.simulated == (20 * MIB, 20 * MIB, 36 * MIB, 36 * MIB)
    assert result.allocated == (5 * MIB, 10 * MIB, 21 * MIB, 21 * MIB)
    assert (result.peak_allocated_bytes, result.num_unknown, result.worst_error) == (21 * MIB, 0, 0)


def test_a_difference_is_told_as_a_part_of_the_peak():
    result = replay_snapshot(
        [
            entry("segment_alloc", 0, 40 * MIB),
            entry("alloc", 0, 5 * MIB),
            entry("segment_free", 0, 20 * MIB),
            entry("alloc", 64, 1),
        ]
    )
    assert result.worst_error == 0.5
    assert (result.recorded_peak_bytes, result.simulated_peak_bytes) == (40 * MIB, 22 * MIB)


def test_frees_of_unknown_blocks_are_counted():
    result = replay_snapshot([entry("free_requested", 5, 512), entry("free_completed", 5, 512)])
    assert (result.num_unknown, result.simulated) == (1, (0,))


def test_private_pools_are_kept_apart():
    result = replay_snapshot(
        [
            entry("alloc", 0, 5 * MIB, pool_id=(0, 0)),
            entry("alloc", 1, 5 * MIB, pool_id=(0, 1)),
            entry("alloc", 2, 5 * MIB),
        ]
    )
    assert result.simulated == (20 * MIB, 40 * MIB, 40 * MIB)


@pytest.mark.parametrize("text", SETTINGS)
def test_a_restored_allocator_is_where_the_other_was(text):
    recorder = Recorder(text)
    recorder.run(Random(1), 300)
    restored = CachingAllocator(parse_settings(text))
    blocks = restore(restored, recorder.segments())
    before = recorder.allocator
    assert restored.reserved_bytes == before.reserved_bytes > 50 * MIB
    assert restored.statistics.allocated_bytes == before.statistics.allocated_bytes
    assert restored.statistics.requested_bytes == before.statistics.requested_bytes
    assert {address: block.size for address, block in blocks.items()} == {
        block.address: block.size for block in recorder.living
    }
    key = [(size, address) for pool in before.pools for size, address, _ in pool.free]
    assert sorted((size, address) for pool in restored.pools for size, address, _ in pool.free) == sorted(key)
    for block in blocks.values():
        restored.free(block)
    restored.empty_cache()
    assert restored.reserved_bytes == 0


@pytest.mark.parametrize("text", SETTINGS)
def test_a_trace_from_the_middle_of_a_run_is_followed_to_the_byte(text):
    recorder, random = Recorder(text), Random(2)
    recorder.run(random, 300)
    segments = recorder.segments()
    recorder.trace.clear()
    recorder.run(random, 700)
    result = replay_snapshot(recorder.trace, settings=parse_settings(text), segments=segments)
    assert (result.worst_error, result.num_unknown) == (0, 0)
    assert len(result.simulated) > 500
    assert len(set(result.simulated)) > 10
    assert result.allocated[-1] == recorder.allocator.statistics.allocated_bytes
    wrong = "" if text else "expandable_segments:True"
    assert replay_snapshot(recorder.trace, settings=parse_settings(wrong)).worst_error > 0.01


@pytest.mark.parametrize("text", SETTINGS)
def test_what_the_day_on_a_gpu_keeps_of_a_trace_is_enough(text):
    recorder, random = Recorder(text), Random(3)
    recorder.run(random, 200)
    segments = recorder.segments()
    recorder.trace.clear()
    recorder.run(random, 300)
    snapshot = {"device_traces": [[], recorder.trace]}
    row = reduce_trace(snapshot, {"forward": 100, "backward": len(recorder.trace)}, segments)
    read_segments, entries = expand_trace(row)
    direct = replay_snapshot(recorder.trace, settings=parse_settings(text), segments=segments)
    assert replay_snapshot(entries, settings=parse_settings(text), segments=read_segments) == direct


def test_blocks_that_wait_for_another_stream_are_restored():
    blocks = [
        {"address": 0, "size": 512, "requested_size": 100, "state": "active_awaiting_free"},
        {"address": 512, "size": 2 * MIB - 512, "requested_size": 0, "state": "inactive"},
    ]
    segment = {"address": 0, "total_size": 2 * MIB, "stream": 0, "segment_type": "small", "is_expandable": False}
    allocator = CachingAllocator()
    waiting = restore(allocator, [{**segment, "blocks": blocks}])[0]
    statistics = allocator.statistics
    assert (statistics.allocated_bytes, statistics.requested_bytes) == (0, 100)
    allocator.complete_free(waiting)
    assert [size for size, _, _ in allocator.pools[0].free] == [2 * MIB]
