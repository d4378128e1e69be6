"""``steady_bytes``: what is steady, in numbers worked out by hand, and what is noise."""

import random
from collections import deque

import pytest

from lightning_vram.memory.leaks import steady_bytes

KIB = 1024


def steady(counts, length=20):
    return steady_bytes([*deque(counts, maxlen=length)], KIB)


def test_a_steady_rise_is_told_by_its_slope():
    for length in (5, 6, 20):
        assert steady((10**9 + 4 * KIB * step for step in range(20)), length) == 4 * KIB


@pytest.mark.parametrize(
    "counts",
    [
        [5 * 10**6] * 40,
        [10**6 * (step % 4) for step in range(40)],
        [10**9] + [10**6] * 39,
        [*range(0, 10**6, 10**5), *[10**6] * 30],
        [10**6] * 30 + [2 * 10**6] * 10,
        list(range(10**6, 0, -25_000)),
    ],
    ids=["flat", "windows", "a fall", "a cache that filled up", "one leap", "falling"],
)
def test_other_courses_are_none(counts):
    assert steady(counts) == 0


def test_batches_of_different_lengths_seldom_look_like_growth():
    source = random.Random(0)
    counts = [10**9 + source.randrange(10**7) for _ in range(2000)]
    found = sum(steady(counts[start : start + 20]) > 0 for start in range(1980))
    assert found <= 2000 / 16  # by chance one of 24: each costs one look
