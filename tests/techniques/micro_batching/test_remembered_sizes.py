"""Sizes that fit, per shape: halved, remembered, tried again."""

import json

from lightning_vram.techniques.micro_batching import MicroBatchSizes

SHAPE, OTHER = "x[8]", "x[16]"


def run(sizes: MicroBatchSizes, room: int, shape: str = SHAPE, num_samples: int = 8) -> list[int]:
    """One batch on a device with room for so many samples of ten elements; the sizes that were tried."""
    tried, size = [], sizes.propose(shape, num_samples, 10 * num_samples)
    while True:
        tried.append(num_samples if size is None else size)
        if tried[-1] <= room:
            sizes.note_success(shape, size, 10 * tried[-1])
            return tried
        sizes.note_failure(shape, tried[-1], 10 * tried[-1])
        size = (tried[-1] + 1) // 2


def test_it_starts_whole_halves_and_remembers():
    sizes = MicroBatchSizes(None)
    assert run(sizes, room=2) == [8, 4, 2]
    assert [run(sizes, room=8) for _ in range(3)] == [[2]] * 3


def test_a_new_shape_starts_below_what_has_failed():
    sizes = MicroBatchSizes(None)
    run(sizes, room=4)
    assert run(sizes, room=16, shape=OTHER, num_samples=16) == [4]
    assert run(sizes, room=16, shape="x[3]", num_samples=3) == [3]
    assert run(sizes, room=4, shape="x[7]", num_samples=7) == [7, 4]


def test_after_some_batches_it_tries_more_and_waits_twice_as_long_after_each_failure():
    sizes = MicroBatchSizes(2)
    assert [run(sizes, room=4) for _ in range(8)] == [[8, 4], [4], [8, 4], [4], [4], [4], [8, 4], [4]]


def test_growing_succeeds_step_by_step():
    sizes = MicroBatchSizes(2)
    run(sizes, room=2)
    assert [run(sizes, room=8) for _ in range(5)] == [[2], [4], [4], [8], [8]]
    assert run(sizes, room=32, shape=OTHER, num_samples=16) == [8]


def test_what_was_learned_survives_a_checkpoint():
    sizes, fresh = MicroBatchSizes(2), MicroBatchSizes(2)
    run(sizes, room=2)
    fresh.load_state_dict(json.loads(json.dumps(sizes.state_dict())))
    assert run(fresh, room=2) == [2]
    assert run(fresh, room=2) == [4, 2]


def test_a_failure_elsewhere_says_nothing_of_elements():
    sizes = MicroBatchSizes(None)
    sizes.propose(SHAPE, 8, 80)
    sizes.note_failure(SHAPE, 8, None)
    assert sizes.propose(SHAPE, 8, 80) == 4
    assert sizes.propose(OTHER, 16, 160) is None
