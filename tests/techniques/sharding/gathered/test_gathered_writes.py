"""What code within a forward writes to weights that are gathered there."""

from functools import partial

import pytest
import torch
from support.sharded_nets import MODES, Net, assert_same, batch, hosted, loss_of, make, on_ranks, take_step, weights
from torch import nn
from torch.optim import SGD

from lightning_vram.private_names.fsdp2 import calls_derived_dispatch

needs_dispatch = pytest.mark.skipif(not calls_derived_dispatch, reason="not seen before torch 2.13")
pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]


def set_data(weight):
    weight.data = weight.data * 0.5


def write_data(weight):
    weight.data.mul_(0.5)


@torch.no_grad()
def write(weight):
    weight.mul_(0.5)


WAYS = {"data =": set_data, "data.mul_": write_data, "mul_": write}


class Writing(Net):
    """Halves the first weight of a block in the block, and the norm's in the root."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.blocks[0].register_forward_pre_hook(lambda block, args: way(block.up.weight))

    def forward(self, x):
        self.way(self.norm.weight)
        return super().forward(x)


def compare_steps(kind, mode="params"):
    net, plain = make(kind), make(kind)
    optimizer, plain_optimizer = SGD(net.parameters(), 0.1), SGD(plain.parameters(), 0.1)
    with hosted(net, mode) as host:
        host.attach([optimizer])
        for seed in range(3):
            take_step(net, optimizer, seed)
            take_step(plain, plain_optimizer, seed)
        during = weights(net)
    tolerance = 1e-6 if torch.distributed.get_world_size() > 1 else 0.0
    assert_same(during, weights(plain), tolerance)
    assert_same(weights(net), weights(plain), tolerance)


@pytest.mark.quick_sample(3)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", WAYS)
def test_writes_count_as_in_a_plain_run(mesh, way, mode):
    compare_steps(partial(Writing, WAYS[way]), mode)


@pytest.mark.parametrize("mode", MODES)
def test_a_write_in_a_forward_without_gradients_stays(mesh, mode):
    net, plain = (make(partial(Writing, write_data)) for _ in range(2))
    with hosted(net, mode):
        for each in (net, plain):
            with torch.no_grad():
                each(batch(0))
        assert torch.equal(loss_of(net, batch(1)), loss_of(plain, batch(1)))
    assert_same(weights(net), weights(plain))


def write_on_two_ranks():
    for way in (write_data, set_data):
        compare_steps(partial(Writing, way))


def test_on_two_ranks_each_keeps_its_part(tmp_path):
    on_ranks(tmp_path, write_on_two_ranks)


class Renormed(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 6, max_norm=0.5)
        self.head = nn.Linear(6, 30)

    def forward(self, x):
        return self.head(self.embed((x * 10).long().abs() % 64))


def test_an_embedding_with_a_largest_norm_is_right_on_one_rank(mesh):
    compare_steps(Renormed)


def refuse_largest_norm():
    net = make(Renormed)
    message = (
        r"^The embedding of parameter 'embed\.weight' has max_norm, with which each rank scales the rows of "
        r"its own batch: the ranks would diverge\. Train on one device, or leave max_norm out\.$"
    )
    optimizer = SGD(net.parameters(), 0.1)
    with hosted(net) as host:
        host.attach([optimizer])
        with pytest.raises(RuntimeError, match=message):
            take_step(net, optimizer)


class ByOptimizer(Net):
    """Halves the norm's weight as its optimizer has it, in the midst of the forward."""

    def __init__(self):
        super().__init__()
        self.held = []  # by its optimizer

    def forward(self, x):
        with torch.no_grad():
            (self.held or [self.norm.weight])[0].mul_(0.5)
        return super().forward(x)


@needs_dispatch
def test_a_shard_that_is_written_beside_what_is_gathered_counts_at_once(mesh):
    net, plain = make(ByOptimizer), make(ByOptimizer)
    with hosted(net):
        net.held.append(net.norm.weight)
        for seed in range(2):
            assert torch.equal(loss_of(net, batch(seed)), loss_of(plain, batch(seed)))
    assert_same(weights(net), weights(plain))


def refuse_write_by_optimizer():
    net = make(ByOptimizer)
    message = (
        r"^Parameter 'norm\.weight' was written through optimizer\.param_groups during a step, in which the "
        r"ranks compute with a copy of it\. Write to the parameters of the module instead\.$"
    )
    with hosted(net):
        net.held.append(net.norm.weight)
        with pytest.raises(RuntimeError, match=message):
            net(batch(0))


def test_what_would_diverge_is_refused_on_two_ranks(tmp_path):
    checks = (refuse_largest_norm, refuse_write_by_optimizer)
    on_ranks(tmp_path, *checks[: 2 if calls_derived_dispatch else 1])  # not seen before torch 2.13
