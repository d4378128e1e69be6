"""Growth: what is steady, in numbers worked out by hand, and what is noise."""

import random

import pytest

from lightning_vram.memory.leaks.search import Growth

KIB = 1024


def series(counts, length=20, min_bytes=KIB):
    growth = Growth(length, min_bytes)
    for count in counts:
        growth.add(count)
    return growth


def test_a_steady_rise_is_told_by_its_slope():
    assert series(10**9 + 4 * KIB * step for step in range(20)).steady_bytes() == 4 * KIB


def test_it_takes_all_counts():
    assert series(4 * KIB * step for step in range(19)).steady_bytes() == 0


def test_a_slope_below_the_least_is_none():
    assert series(range(0, 20 * 1023, 1023)).steady_bytes() == 0
    assert series(range(0, 20 * 1024, 1024)).steady_bytes() == 1024


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
    assert series(counts).steady_bytes() == 0


def test_batches_of_different_lengths_are_no_growth():
    source = random.Random(0)
    growth, found = Growth(20, KIB), 0
    for _ in range(2000):
        growth.add(10**9 + source.randrange(10**7))
        found += growth.steady_bytes() > 0
    assert found <= 2  # by chance: each costs one look


@pytest.mark.parametrize(("slope", "expected"), [(4 * KIB, True), (KIB, True), (KIB // 4, False), (0, False)])
def test_goes_on(slope, expected):
    growth = series(slope * step for step in range(20))
    assert growth.is_full
    assert growth.goes_on() is expected


def test_a_restart_forgets():
    growth = series(4 * KIB * step for step in range(320))
    growth.restart()
    assert not growth.is_full
    assert growth.steady_bytes() == 0
