"""The schedule: which factor holds when, and how many steps there will be."""

from hypothesis import given
from hypothesis import strategies as st

from lightning_vram.techniques.accumulation_schedule import read_schedule


def test_a_factor_holds_from_its_start_on_and_one_before():
    schedule = read_schedule("factors", "epoch", {2: 4, 5: 3})
    assert [schedule.factor(epoch, 99) for epoch in range(7)] == [1, 1, 4, 4, 4, 3, 3]
    schedule = read_schedule("factors", "step", {0: 2, 3: 5})
    assert [schedule.factor(99, step) for step in range(5)] == [2, 2, 2, 5, 5]
    assert schedule.largest == 5


@given(
    factors=st.dictionaries(st.integers(0, 12), st.integers(1, 6), min_size=1, max_size=4),
    unit=st.sampled_from(["epoch", "step"]),
    num_batches=st.integers(0, 12),
    num_epochs=st.integers(1, 9),
)
def test_steps_are_those_of_a_walk_over_the_batches(factors, unit, num_batches, num_epochs):
    schedule = read_schedule("factors", unit, dict(sorted(factors.items())))
    step = 0
    for epoch in range(num_epochs):
        num_left = num_batches
        while num_left > 0:
            num_left -= schedule.factor(epoch, step)
            step += 1
    assert schedule.count_steps(num_batches, num_epochs) == step


def test_no_batches_make_no_steps():
    assert read_schedule("factors", "step", {0: 2, 3: 4}).count_steps(0, 5) == 0
