"""The axis of bytes."""

import pytest
from support.estimates import GIB, MIB

from lightning_vram.report.drawing import choose_scale


@pytest.mark.parametrize(
    ("limit_bytes", "unit", "labels"),
    [
        (600 * MIB, "GiB", ["0", "0.2", "0.4", "0.6", "0.8", "1"]),  # up to 1026 MiB
        (GIB, "GiB", ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (2 * GIB, "GiB", ["0", "0.5", "1", "1.5", "2"]),
    ],
)
def test_marks_are_round_numbers(limit_bytes, unit, labels):
    scale = choose_scale(900 * MIB, limit_bytes)
    assert scale.unit == unit
    assert [scale.label(tick) for tick in scale.ticks] == labels


@pytest.mark.parametrize("size", [1, 7, 999, 2**20 + 1, 3 * 2**30, 5 * 2**40, 2**50])
def test_every_size_has_a_few_marks(size):
    scale = choose_scale(size, size)
    assert 3 <= len(scale.ticks) <= 9
    assert scale.ticks[-1] <= scale.end_bytes
