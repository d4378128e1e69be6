"""A timeline as columns of a picture."""

import random

import pytest
from support.estimates import MIB, allocation, timeline_of, training_timeline

from lightning_vram.memory.tracking.timeline import Category, Phase
from lightning_vram.report.estimate import Span, read_step


def test_it_begins_with_what_is_held_and_leaves_the_host_out():
    step = read_step(training_timeline(), max_columns=100)
    assert [column.live_bytes // MIB for column in step.columns] == [
        *(300, 600, 610),
        *(600, 660, 760, 460, 400),
        *(450, 400),
        300,
    ]
    assert step.columns[0].by_category[Category.OPTIMIZER_STATE] == 200 * MIB
    assert step.num_events == 11


def test_phases_follow_each_other_and_what_comes_after_the_step_is_the_rest():
    forward, backward, optimizer_step = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER_STEP
    assert read_step(training_timeline(), max_columns=100).spans == (
        Span(forward, 0, 3),
        Span(backward, 3, 8),
        Span(optimizer_step, 8, 10),
        Span(forward, 10, 11, is_rest=True),
    )


@pytest.mark.parametrize("seed", range(2))
def test_ten_thousand_events_keep_their_peak_in_a_hundred_columns(seed):
    drawn = random.Random(seed)
    made, changes = [], []
    for number in range(5000):
        made.append(allocation(f"op{number}", "", drawn.choice(list(Category))))
        changes.append((number, drawn.randrange(1, 50), Phase.FORWARD))
        if number:
            dead = drawn.randrange(max(0, number - 30), number)
            size = sum(size for one, size, _ in changes[-200:] if one == dead)
            changes.append((dead, -size, Phase.BACKWARD))
    timeline = timeline_of(made, [change for change in changes if change[1]])
    step = read_step(timeline, max_columns=100)
    assert len(step.columns) == 100
    assert step.columns[step.peak].live_bytes == timeline.peak_bytes
    assert step.columns[step.peak].op == timeline.peak_op
    assert dict(step.columns[step.peak].by_category) == timeline.peak_by_category
