"""The axis of bytes."""

import pytest
from support.estimates import GIB, MIB, estimate_of

from lightning_vram.report.drawing import ticks, unit_of
from lightning_vram.report.estimate import axis_bytes


def marks(end_bytes: float) -> tuple[str, list[str]]:
    unit_bytes, unit = unit_of(end_bytes)
    return unit, [f"{number:g}" for number in ticks(0, end_bytes / unit_bytes, 7)]


@pytest.mark.parametrize(
    ("limit_bytes", "unit", "labels"),
    [
        (600 * MIB, "MiB", ["0", "200", "400", "600", "800"]),  # 800 MiB are reserved
        (GIB, "GiB", ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        (2 * GIB, "GiB", ["0", "0.5", "1", "1.5", "2"]),
        (80 * GIB, "MiB", ["0", "200", "400", "600", "800"]),  # too far to be shown
    ],
)
def test_marks_are_round_numbers(limit_bytes, unit, labels):
    assert marks(axis_bytes(estimate_of(limit_bytes=limit_bytes))) == (unit, labels)
