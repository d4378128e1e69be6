"""AdamW beside the training, without Lightning."""

import pytest
import torch
from support.sharded_nets import assert_same, batch, loss_of, make, weights
from torch.optim.lr_scheduler import StepLR

from lightning_vram.optimizers.on_host import HostOptimizers
from lightning_vram.techniques.sharding.apply import FullSharding, ShardingOptions
from lightning_vram.techniques.sharding.grouping import plan_sharding_groups

pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore::UserWarning")]
NUM_STEPS = 5


def shard(net, mesh):
    return FullSharding(net, mesh, plan_sharding_groups(net, min_params=100), ShardingOptions())


def attach(net, mesh, **options):
    sharding = shard(net, mesh)
    host = HostOptimizers(sharding, num_threads=1, **options)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    host.attach([optimizer])
    return host, optimizer


def end(host):
    host.finish()
    host.let_go(host._sharding.remove())


def train_plainly(max_norm=None, gamma=1.0):
    net = make()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, fused=True)
    scheduler = StepLR(optimizer, 2, gamma)
    for seed in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(net, batch(seed)).backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm)
        optimizer.step()
        scheduler.step()
    return net, optimizer


@pytest.mark.parametrize("on_disk", [False, True], ids=["host", "disk"])
@pytest.mark.parametrize("max_norm", [None, 1e-2], ids=["", "clipped"])
def test_weights_are_those_of_the_fused_kernel(max_norm, on_disk, mesh, tmp_path):
    net = make()
    host, optimizer = attach(net, mesh, nvme_path=tmp_path if on_disk else None)
    scheduler = StepLR(optimizer, 2, 0.5)
    for seed in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(net, batch(seed)).backward()
        if max_norm is not None:
            host.clip_norm(optimizer, max_norm, may_wait=True)
        optimizer.step()
        scheduler.step()
    end(host)
    assert_same(weights(net), weights(train_plainly(max_norm, gamma=0.5)[0]))


def test_a_step_in_the_backward_has_the_same_result(mesh):
    net = make()
    host, optimizer = attach(net, mesh)
    host.may_step_early = lambda closure: True
    begun = []
    sharding_landed = host._sharding.on_landed

    def landed(group):
        sharding_landed(group)
        begun.append(group.steps._pending is not None)

    host._sharding.on_landed = landed
    for seed in range(NUM_STEPS):

        def closure(seed=seed):
            optimizer.zero_grad()
            loss = loss_of(net, batch(seed))
            loss.backward()
            return loss

        assert optimizer.step(closure).requires_grad
    end(host)
    assert any(begun)
    assert_same(weights(net), weights(train_plainly()[0]))


def test_states_are_those_of_a_plain_optimizer_and_load_into_one(mesh):
    net = make()
    host, optimizer = attach(net, mesh)
    for seed in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(net, batch(seed)).backward()
        optimizer.step()
    end(host)
    plain_net, plain = train_plainly()
    ours, theirs = optimizer.state_dict()["state"], plain.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for index, state in theirs.items():
        assert all(torch.equal(ours[index][key], value) for key, value in state.items())
    plain.load_state_dict(optimizer.state_dict())
    plain.zero_grad()
    loss_of(plain_net, batch(9)).backward()
    plain.step()
