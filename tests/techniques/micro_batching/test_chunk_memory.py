"""Sizes planned from what small chunks needed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_vram.techniques.micro_batching import ChunkMemory

sizes = st.integers(1, 4096)
memory_bytes = st.integers(0, 2**40)
observations = st.dictionaries(sizes, memory_bytes, min_size=2, max_size=8)


def remember(seen: dict[int, int]) -> ChunkMemory:
    memory = ChunkMemory()
    for size, peak_bytes in seen.items():
        memory.observe(size, peak_bytes)
    return memory


def test_nothing_is_known_from_one_size():
    memory = ChunkMemory()
    assert memory.largest_size(10**9, limit=8) is None
    memory.observe(2, 100)
    memory.observe(2, 120)
    assert memory.largest_size(10**9, limit=8) is None
    assert memory.predict_bytes(2) is None
    assert memory.largest_size(10, limit=1) == 1  # no choice


@given(fixed=memory_bytes, slope=st.integers(1, 2**30), one=sizes, other=sizes, limit=sizes, room=memory_bytes)
def test_a_line_is_found(fixed, slope, one, other, limit, room):
    if one == other:
        return
    memory = remember({size: fixed + slope * size for size in (one, other)})
    predicted = memory.predict_bytes(limit)
    assert predicted == pytest.approx(fixed + slope * limit, rel=1e-6, abs=2)
    found = memory.largest_size(room, limit, margin=0)
    assert found == 1 if limit == 1 else abs(found - min(limit, max(1, (room - fixed) // slope))) <= 1 + limit / 10**5


def test_the_margin_is_left_free():
    memory = remember({1: 110, 2: 120})
    assert memory.largest_size(200, limit=64, margin=0) == 10
    assert memory.largest_size(200, limit=64) == 8
    assert memory.largest_size(200, limit=64, margin=0.5) == 1  # 100 bytes: not even one, but less is impossible
    assert memory.largest_size(10**6, limit=64) == 64
    assert memory.largest_size(0, limit=64) == 1


def test_what_grows_with_nothing_counts_in_full():
    memory = remember({1: 100, 2: 90})  # noise
    assert memory.predict_bytes(4) == 400
    assert memory.largest_size(1000, limit=64, margin=0) == 10
    assert remember({1: 0, 2: 0}).largest_size(0, limit=64) == 64


def test_faster_growth_is_followed():
    memory = remember({1: 1, 10: 100})
    assert memory.predict_bytes(20) == 210
    assert memory.predict_bytes(1) == 1


@given(seen=observations, size=sizes, more=sizes)
def test_predictions_are_never_below_what_was_seen(seen, size, more):
    memory = remember(seen)
    assert all(memory.predict_bytes(other) >= peak for other, peak in seen.items())
    assert memory.predict_bytes(size + more) >= memory.predict_bytes(size) >= 0


@given(seen=observations, room=memory_bytes, limit=sizes, margin=st.floats(0, 0.9))
def test_the_largest_size_is_the_largest_that_fits(seen, room, limit, margin):
    memory = remember(seen)
    found = memory.largest_size(room, limit, margin)
    allowed_bytes = int(room * (1 - margin))
    assert 1 <= found <= limit
    assert found == 1 or memory.predict_bytes(found) <= allowed_bytes
    assert found == limit or memory.predict_bytes(found + 1) > allowed_bytes


@given(seen=observations, size=sizes)
def test_a_checkpoint_knows_as_much(seen, size):
    memory = remember(seen)
    restored = remember({5: 10**9})
    restored.load_state_dict(json.loads(json.dumps(memory.state_dict())))
    assert restored.predict_bytes(size) == memory.predict_bytes(size)
    restored.observe(size, 2**41)
    assert memory.state_dict() == {"peak_bytes": seen}  # a copy


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: m.observe(0, 1), ValueError, r"^ChunkMemory\.observe\(size\) must be at least 1, got 0\.$"),
        (lambda m: m.observe(1.5, 1), TypeError, r"^ChunkMemory\.observe\(size\) must be an int, got 1\.5 of type "),
        (
            lambda m: m.observe(1, -1),
            ValueError,
            r"^ChunkMemory\.observe\(peak_bytes\) must not be negative, got -1\.$",
        ),
        (
            lambda m: m.largest_size(1, 0),
            ValueError,
            r"^ChunkMemory\.largest_size\(limit\) must be at least 1, got 0\.$",
        ),
        (
            lambda m: m.largest_size(1, 1, margin=1.0),
            ValueError,
            r"^ChunkMemory\.largest_size\(margin\) must be at least 0 and below 1, got 1\.0\.$",
        ),
        (lambda m: m.load_state_dict({"peak_bytes": {"0": 1}}), ValueError, r"must be at least 1, got 0\.$"),
    ],
)
def test_wrong_values_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call(ChunkMemory())
