"""Momentum of running statistics for parts of a batch."""

import copy

import pytest
import torch
from torch import nn

from lightning_vram.core.batches.micro_batches import NormMomentum, find_batch_norms


@pytest.fixture
def net():
    return nn.ModuleDict(
        {
            "plain": nn.BatchNorm1d(2, momentum=0.3),
            "frozen": nn.BatchNorm1d(2).eval(),
            "cumulative": nn.BatchNorm1d(2, momentum=None),
            "stateless": nn.BatchNorm1d(2, track_running_stats=False),
            "instance": nn.InstanceNorm1d(2, momentum=0.5, track_running_stats=True),
            "layer": nn.LayerNorm(2),
        }
    )


def momenta(net):
    return {name: getattr(module, "momentum", None) for name, module in net.items()}


def test_equal_parts_forget_as_much_as_a_batch(net):
    before, momentum = momenta(net), NormMomentum(net)
    assert momentum.names == ("plain", "instance")
    momentum.scale(1 / 4)
    assert (1 - net["plain"].momentum) ** 4 == pytest.approx(0.7, abs=1e-15)
    assert (1 - net["instance"].momentum) ** 4 == pytest.approx(0.5, abs=1e-15)
    momentum.restore()
    momentum.restore()
    assert momenta(net) == before


def test_a_mean_over_parts_of_the_same_data_is_that_of_the_batch(net):
    norm, whole = net["plain"], copy.deepcopy(net["plain"])
    samples = torch.randn(8, 2, dtype=torch.float64)
    norm.double()
    whole.double()(samples)
    momentum = NormMomentum(norm)
    for share in (0.25, 0.5, 0.25):
        momentum.scale(share)
        norm(samples)
    assert torch.allclose(norm.running_mean, whole.running_mean, rtol=0, atol=1e-15)
    assert torch.allclose(norm.running_var, whole.running_var, rtol=0, atol=1e-15)


def test_a_second_scaling_replaces_the_first_and_one_is_exact(net):
    momentum = NormMomentum(net)
    momentum.scale(1 / 2)
    momentum.scale(1 / 3)
    assert net["plain"].momentum == 1 - 0.7 ** (1 / 3)
    momentum.scale(1)
    assert net["plain"].momentum == 0.3


def test_mode_counts_at_the_time_of_scaling(net):
    momentum = NormMomentum(net)
    net["plain"].eval()
    net["frozen"].train()
    assert momentum.names == ("frozen", "instance")
    momentum.scale(1 / 2)
    net["frozen"].eval()
    momentum.restore()
    assert (net["plain"].momentum, net["frozen"].momentum) == (0.3, 0.1)


def test_layers_that_go_by_the_batch_are_found(net):
    assert find_batch_norms(net) == ("plain", "cumulative", "stateless")
    net.eval()
    assert find_batch_norms(net) == ("stateless",)
