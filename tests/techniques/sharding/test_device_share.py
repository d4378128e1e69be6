"""Which groups of a module stay on the device, or have a copy there."""

import pytest
from support.sharded_nets import WIDTH, make, on_ranks, sharded

from lightning_vram.techniques.sharding.flat_shards import plan_residency

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]
BLOCK = WIDTH * 9 + 9 + 9 * WIDTH + WIDTH
HEAD = WIDTH * 20 + 20
NORM = 2 * WIDTH
ALL = 3 * BLOCK + HEAD + NORM


def plan(net, device_bytes):
    """Return the places of groups: the root, the blocks, the head."""
    with sharded(net, device_bytes=device_bytes) as sharding:
        copied = [group.flat_shards[0].resident is not None for group in sharding.groups]
        pairs = zip(sharding.groups, copied, strict=True)
        return ["device" if group.landing is None else "copy" if is_copied else "host" for group, is_copied in pairs]


def test_the_root_comes_first_and_has_what_no_other_part_has(mesh):
    net = make()
    assert plan(net, 0) == ["host"] * 5
    assert plan(net, 4 * NORM) == ["copy"] + ["host"] * 4
    assert plan(net, 4 * (NORM + BLOCK)) == ["copy", "copy", *["host"] * 3]
    assert plan(net, 4 * ALL) == ["copy"] * 5
    assert plan(net, 4 * ALL + 12 * NORM) == ["device"] + ["copy"] * 4
    assert plan(net, 16 * ALL - 1) == ["device"] * 4 + ["copy"]
    assert plan(net, 16 * ALL) == ["device"] * 5
    net.blocks.requires_grad_(requires_grad=False)  # of frozen layers there is no more than their copies
    assert plan(net, 4 * (3 * BLOCK + NORM)) == ["copy", *["device"] * 3, "host"]


def test_a_share_is_one_of_all_that_could_be_there(mesh):
    net = make()
    for share in (0.0, 0.2, 0.25, 0.6, 1.0):
        assert plan(net, share) == plan(net, int(share * 16 * ALL))


def count_padding():
    norm = 2 * 2  # 6 elements, over 4 ranks
    assert plan(make(), 4 * norm) == ["copy"] + ["host"] * 4
    assert plan(make(), 4 * norm - 1) == ["host"] * 5


def test_each_rank_counts_its_shards_and_what_they_are_padded_by(tmp_path):
    on_ranks(tmp_path, count_padding, num_ranks=4)


FIRST, SECOND, THIRD = (40, 160), (8, 32), (20, 80)  # bytes of the copy, and of all: 10, 2 and 5 weights in float32


@pytest.mark.parametrize(
    ("budget_bytes", "places"),
    [
        (0, ["host", "host", "host"]),
        (27, ["host", "copy", "host"]),  # the first does not fit, what is behind it does
        (28, ["host", "copy", "copy"]),
        (68, ["copy", "copy", "copy"]),
        (68 + 24, ["copy", "device", "copy"]),  # 12 bytes more for each weight
        (68 + 119, ["copy", "device", "device"]),
        (68 + 120, ["device", "copy", "copy"]),
        (68 + 144, ["device", "device", "copy"]),
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
