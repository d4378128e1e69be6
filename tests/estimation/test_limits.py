"""The largest size that fits, by a law through a few runs."""

from dataclasses import replace

import pytest

from lightning_vram.estimation.limits import largest_that_fits
from lightning_vram.estimation.size_law import SizeLaw
from lightning_vram.estimation.traced_fit import TracedFit
from lightning_vram.memory.tracking.timeline import Allocation, Category, MemoryEvent, MemoryTimeline, Phase


def a_run(*changes):
    """One allocation for each change of bytes, all of them freed at the end."""
    allocations = tuple(
        Allocation(f"op{number}", "", Phase.FORWARD, Category.ACTIVATIONS, "lazy:0") for number in range(len(changes))
    )
    births = [MemoryEvent(number, change, Phase.FORWARD) for number, change in enumerate(changes)]
    deaths = [MemoryEvent(number, -change, Phase.BACKWARD) for number, change in enumerate(changes)]
    timeline = MemoryTimeline(allocations, (*births, *deaths), (), "lazy:0")
    return TracedFit(timeline, {"train": (0, len(timeline.events))})


def batch_of(size):
    return a_run(1000, 40 * size, 6 * size)


def sequence_of(length):
    return a_run(1000, 40 * length, 3 * length**2)


def peak_of(run):
    return run.timeline.peak_bytes


def test_a_step_of_another_batch_is_predicted_to_the_byte():
    law = SizeLaw({8: batch_of(8), 4: batch_of(4)})
    for size in (1, 2, 7, 64):
        assert law.predict(size).timeline == batch_of(size).timeline


def test_a_step_of_another_length_is_predicted_to_the_byte():
    law = SizeLaw({64: sequence_of(64), 48: sequence_of(48), 32: sequence_of(32)})
    for length in (8, 33, 500):
        assert law.predict(length).timeline == sequence_of(length).timeline


def test_nothing_follows_from_steps_that_did_other_things():
    with pytest.raises(ValueError, match="does other things at the sizes 8, 4"):
        SizeLaw({8: batch_of(8), 4: a_run(1000, 160)})
    assert largest_that_fits(lambda size: a_run(size), peak_of, 10_000, (8, 4), batch_of(8)) is None


@pytest.mark.parametrize(
    ("limit_bytes", "largest"),
    [(1000 + 46 * 20, 20), (1000 + 46 * 21 - 1, 20), (1000 + 46 * 3, 3), (1000 + 46, 1), (1045, 0)],
)
def test_the_largest_batch_is_found_and_traced(limit_bytes, largest):
    traced = []

    def trace(size):
        traced.append(size)
        return batch_of(size)

    assert largest_that_fits(trace, peak_of, limit_bytes, (8, 4), batch_of(8)) == largest
    assert traced == [4, *([largest] if largest else [])]


def test_a_law_that_a_trace_belies_gives_no_answer():
    def trace(size):
        return batch_of(size) if size <= 8 else a_run(1000, 40 * size, 6 * size + 5000)

    assert largest_that_fits(trace, peak_of, 3000, (8, 4), batch_of(8)) is None


def test_what_kernels_take_for_a_moment_follows_no_law_and_does_not_hinder_one():
    def with_scratch(size, num_blocks):
        run = batch_of(size)
        timeline, first = run.timeline, len(run.timeline.allocations)
        scratch = [Allocation("aten.sum (scratch)", "", Phase.FORWARD, Category.TEMPORARIES, "lazy:0")] * num_blocks
        births = [MemoryEvent(first + number, 512, Phase.FORWARD) for number in range(num_blocks)]
        deaths = [MemoryEvent(first + number, -512, Phase.FORWARD) for number in range(num_blocks)]
        events = (*timeline.events[:2], *births, *deaths, *timeline.events[2:])
        return TracedFit(
            replace(timeline, allocations=(*timeline.allocations, *scratch), events=events), {"train": (0, len(events))}
        )

    law = SizeLaw({8: with_scratch(8, 2), 4: with_scratch(4, 0)})
    assert law.predict(16).timeline.events == batch_of(16).timeline.events
    law = SizeLaw({8: with_scratch(8, 1), 4: with_scratch(4, 1)})
    assert law.predict(16).timeline == with_scratch(16, 1).timeline
