"""Which groups of a module are where, and what they take: planned before, or while it trains."""

import pytest
import torch
from support.sharded_nets import (
    WIDTH,
    Net,
    assert_same,
    host_bytes_of,
    hosted,
    make,
    on_ranks,
    sharded,
    take_step,
    weights,
)
from torch import nn

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]
BLOCK = WIDTH * 9 + 9 + 9 * WIDTH + WIDTH
HEAD = WIDTH * 20 + 20
NORM = 2 * WIDTH
ALL = 3 * BLOCK + HEAD + NORM


def plan(net, device_bytes, **options):
    """Return the places of groups: the root, the blocks, the head."""
    with sharded(net, device_bytes=device_bytes, **options) as sharding:
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


def test_weights_that_are_sent_in_16_bit_have_smaller_copies(mesh):
    net = make()
    narrow = {"low_precision_dtype": torch.bfloat16, "low_precision": {name for name, _ in net.named_parameters()}}
    assert plan(net, 2 * ALL, **narrow) == ["copy"] * 5
    assert plan(net, 2 * ALL) != ["copy"] * 5


def held_bytes(sharding, optimizer):
    """What is on the device, if that is where groups are that have no thread to land in."""
    total = 0
    for group in sharding.groups:
        total += sum(flat_shard.resident.nbytes for flat_shard in group.flat_shards if flat_shard.resident is not None)
        for parameter in (parameter.sharded_param for parameter in group.fsdp_params if group.landing is None):
            state = optimizer.state[parameter]
            held = (parameter, parameter.grad, state["exp_avg"], state["exp_avg_sq"])
            total += sum(tensor.to_local().nbytes for tensor in held)
    return total


def test_bytes_grow_with_the_budget_and_weights_stay_the_same(mesh):
    plain = make()
    reference = torch.optim.AdamW(plain.parameters(), fused=True)
    for seed in range(3):
        take_step(plain, reference, seed)
    before = 0
    for budget_bytes in (*range(0, 16 * ALL, 2 * ALL), 16 * ALL):
        net = make()
        with hosted(net, device_bytes=budget_bytes) as host:
            optimizer = torch.optim.AdamW(net.parameters())
            host.attach([optimizer])
            for seed in range(3):
                take_step(net, optimizer, seed)
            host.finish()
            now = held_bytes(host._sharding, optimizer)
            assert before <= now <= budget_bytes
            assert host_bytes_of(host._sharding) == 4 * (ALL - count_on_device(host._sharding))
            before = now
        assert_same(weights(net), weights(plain))
    assert before == 16 * ALL


def count_on_device(sharding):
    on_device = [group for group in sharding.groups if group.landing is None]
    return sum(flat_shard.shards.numel() for group in on_device for flat_shard in group.flat_shards)


class Frozen(Net):
    """Of which a part is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks.requires_grad_(requires_grad=False)


def test_frozen_layers_of_which_there_is_a_copy_have_nothing_on_the_host(mesh):
    net, plain = make(Frozen), make(Frozen)
    assert plan(make(Frozen), 4 * (3 * BLOCK + NORM)) == ["copy", *["device"] * 3, "host"]
    reference = torch.optim.SGD(plain.head.parameters(), 0.1)
    with hosted(net, device_bytes=4 * (3 * BLOCK + NORM)) as host:
        optimizer = torch.optim.SGD(net.head.parameters(), 0.1)
        host.attach([optimizer])
        for seed in range(2):
            take_step(net, optimizer, seed)
            take_step(plain, reference, seed)
    assert_same(weights(net), weights(plain))
    assert isinstance(net.head, nn.Linear)
