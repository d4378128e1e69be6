"""Which groups stay on the device, by numbers worked out by hand."""

import pytest
import torch

from lightning_vram.techniques.sharding.flat_shards import (
    ShardBytes,
    count_shard_bytes,
    plan_residency,
)

WIDE = (torch.float32, torch.float32)
NARROW = (torch.float32, torch.bfloat16)
HALF = (torch.bfloat16, torch.bfloat16)


def group(numel, dtypes=WIDE, *, is_trained=True):
    return count_shard_bytes([(numel, *dtypes, is_trained)])


GROUPS = [
    group(10),
    group(3, NARROW),
    group(7),
    group(2, is_trained=False),
    group(5),
    group(4, NARROW, is_trained=False),
]


@pytest.mark.parametrize(
    ("dtypes", "is_trained", "expected"),
    [
        (WIDE, True, ShardBytes(copy_bytes=4, device_bytes=16, sent_bytes=12, sent_with_copy_bytes=8)),
        (NARROW, True, ShardBytes(copy_bytes=2, device_bytes=16, sent_bytes=6, sent_with_copy_bytes=4)),
        (HALF, True, ShardBytes(copy_bytes=2, device_bytes=8, sent_bytes=6, sent_with_copy_bytes=4)),
        (WIDE, False, ShardBytes(copy_bytes=4, device_bytes=4, sent_bytes=8, sent_with_copy_bytes=0)),
        (NARROW, False, ShardBytes(copy_bytes=2, device_bytes=4, sent_bytes=4, sent_with_copy_bytes=0)),
    ],
)
def test_bytes_of_one_weight(dtypes, is_trained, expected):
    assert group(1, dtypes, is_trained=is_trained) == expected


def test_bytes_of_all_shards_of_a_group_are_added():
    assert count_shard_bytes([(3, *WIDE, True), (5, *NARROW, False)]) == ShardBytes(12 + 10, 48 + 20, 36 + 20, 24)
    assert count_shard_bytes([]) == ShardBytes(0, 0, 0, 0)


@pytest.mark.parametrize(
    ("budget_bytes", "places"),
    [
        (0, ["host", "host", "host"]),
        (27, ["host", "copy", "host"]),  # the first does not fit, what is behind it does
        (39, ["host", "copy", "copy"]),
        (40, ["copy", "host", "host"]),
        (48, ["copy", "copy", "host"]),
        (68, ["copy", "copy", "copy"]),
        (68 + 23, ["copy", "copy", "copy"]),
        (68 + 24, ["copy", "device", "copy"]),  # 12 bytes more for each weight
        (68 + 83, ["copy", "device", "copy"]),
        (68 + 119, ["copy", "device", "device"]),
        (68 + 120, ["device", "copy", "copy"]),  # at equal gain, the first
        (68 + 144, ["device", "device", "copy"]),
        (271, ["device", "device", "copy"]),
        (272, ["device", "device", "device"]),
        (10**9, ["device", "device", "device"]),
    ],
)
def test_copies_come_first_and_the_first_groups(budget_bytes, places):
    assert plan_residency([group(10), group(2), group(5)], budget_bytes) == places


def test_a_frozen_group_comes_before_the_others():
    groups = [group(2), group(2, is_trained=False), group(4, NARROW, is_trained=False)]
    assert plan_residency(groups, 8) == [
        "host",
        "device",
        "host",
    ]  # 16 bytes less on the bus for 8, as that of the next
    assert plan_residency(groups, 16) == ["host", "device", "copy"]
    assert plan_residency(groups, 24) == ["copy", "device", "copy"]
    assert plan_residency(groups, 24 + 24) == ["device", "device", "copy"]
    assert plan_residency(groups, 24 + 24 + 8) == ["device", "device", "device"]  # off the host, though nothing is sent


def test_a_group_without_parameters_stays_where_it_is():
    assert plan_residency([count_shard_bytes([])], 10) == ["host"]


def test_more_bytes_are_never_used_worse():
    before_bytes = before_saved = 0
    for budget_bytes in range(sum(group.device_bytes for group in GROUPS) + 1):
        places = plan_residency(GROUPS, budget_bytes)
        taken = sum(
            {"host": 0, "copy": group.copy_bytes, "device": group.device_bytes}[place]
            for group, place in zip(GROUPS, places, strict=True)
        )
        sent = {"host": "sent_bytes", "copy": "sent_with_copy_bytes"}
        saved = sum(
            group.sent_bytes - (0 if place == "device" else getattr(group, sent[place]))
            for group, place in zip(GROUPS, places, strict=True)
        )
        assert before_bytes <= taken <= budget_bytes
        assert saved >= before_saved
        before_bytes, before_saved = taken, saved
    assert places == ["device"] * len(GROUPS)
