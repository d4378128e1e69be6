"""Traces in the form of ``torch.cuda.memory._snapshot()``: by hand, and recorded of the simulated allocator itself."""

from random import Random

import pytest
from support.allocator_snapshots import replay_snapshot

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
            if random.random() < 0.5 or not self.living:
                asked = int(2 ** random.uniform(4, 26))
                stream = random.randrange(2)
                block = self.allocator.malloc(asked, stream)
                self._note_segments(reserved)
                self._note("alloc", block, asked, stream)
                self.living.append((block, stream))
            else:
                block, stream = self.living.pop(random.randrange(len(self.living)))
                self._note("free_requested", block, block.requested_bytes, stream)
                self._note("free_completed", block, block.requested_bytes, stream)
                self.allocator.free(block)

    def _note(self, action, block, size, stream):
        self.trace.append({"action": action, "addr": block.address, "size": size, "stream": stream})

    def _note_segments(self, before):
        change = self.allocator.reserved_bytes - before
        if change > 0:
            self.trace.append({"action": "segment_alloc", "addr": 0, "size": change, "stream": 0})

    def segments(self):
        """As in a snapshot."""
        living = dict(self.living)
        found = []
        for (stream, is_small), pool in self.allocator._pools.items():
            blocks = {block for _, _, block in pool.free} | {one for one in living if one.pool is pool}
            for head in sorted((one for one in blocks if one.previous is None), key=lambda one: one.address):
                chain, block = [], head
                while block is not None:
                    state = "active_allocated" if block in living else "inactive"
                    size, requested = block.size, block.requested_bytes
                    chain.append({"address": block.address, "size": size, "requested_size": requested, "state": state})
                    block = block.next
                found.append(
                    {
                        "address": head.address,
                        "total_size": sum(one["size"] for one in chain),
                        "stream": stream,
                        "segment_type": "small" if is_small else "large",
                        "segment_pool_id": (0, 0),
                        "is_expandable": self.allocator.settings.expandable_segments,
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
        ]
    )
    assert result.recorded == result.simulated == (20 * MIB, 20 * MIB, 36 * MIB, 36 * MIB)
    assert result.allocated == (5 * MIB, 10 * MIB, 26 * MIB, 21 * MIB)
    assert (result.peak_allocated_bytes, result.num_unknown, result.worst_error) == (26 * MIB, 0, 0)


def test_a_difference_is_told_as_a_part_of_the_peak():
    result = replay_snapshot([entry("segment_alloc", 0, 40 * MIB), entry("alloc", 0, 5 * MIB), entry("alloc", 64, 1)])
    assert result.worst_error == 0.5
    assert (result.recorded_peak_bytes, result.simulated_peak_bytes) == (40 * MIB, 22 * MIB)


def test_frees_of_unknown_blocks_are_counted():
    result = replay_snapshot([entry("free_requested", 5, 512), entry("free_completed", 5, 512)])
    assert (result.num_unknown, result.simulated) == (1, (0,))


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
    assert len(set(result.simulated)) > 4
    assert result.allocated[-1] == recorder.allocator.allocated_bytes
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
