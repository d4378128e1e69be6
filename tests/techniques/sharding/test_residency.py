"""Which groups stay on the device, by numbers worked out by hand."""

import pytest

from lightning_vram.techniques.sharding.flat_shards import plan_residency

FIRST, SECOND, THIRD = (40, 160), (8, 32), (20, 80)  # bytes of the copy, and of all: 10, 2 and 5 weights in float32


@pytest.mark.parametrize(
    ("budget_bytes", "places"),
    [
        (0, ["host", "host", "host"]),
        (27, ["host", "copy", "host"]),  # the first does not fit, what is behind it does
        (28, ["host", "copy", "copy"]),
        (40, ["copy", "host", "host"]),
        (48, ["copy", "copy", "host"]),
        (68, ["copy", "copy", "copy"]),
        (68 + 23, ["copy", "copy", "copy"]),
        (68 + 24, ["copy", "device", "copy"]),  # 12 bytes more for each weight
        (68 + 83, ["copy", "device", "copy"]),
        (68 + 119, ["copy", "device", "device"]),
        (68 + 120, ["device", "copy", "copy"]),
        (68 + 144, ["device", "device", "copy"]),
        (271, ["device", "device", "copy"]),
        (272, ["device", "device", "device"]),
        (10**9, ["device", "device", "device"]),
    ],
)
def test_copies_come_first_and_the_first_groups(budget_bytes, places):
    assert plan_residency([FIRST, SECOND, THIRD], budget_bytes) == places


def test_a_frozen_group_of_which_there_is_a_copy_has_nothing_on_the_host():
    assert plan_residency([(8, 8), (8, 32)], 8) == ["device", "host"]


def test_a_group_without_parameters_stays_where_it_is():
    assert plan_residency([(0, 0)], 10) == ["host"]
