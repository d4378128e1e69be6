"""Weights that are read in 16 bit alone: those of stock layers that nobody else owns."""

import torch
from torch import nn

from lightning_vram.techniques.mixed_precision.weight_casts import find_autocast_weights


class Scaled(nn.Linear):
    """Has a forward of its own, which may read its weight in any way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.weight.sum()


def make_net() -> nn.ModuleDict:
    layers = {
        "embed": nn.Embedding(7, 4),
        "linear": nn.Linear(4, 4),
        "conv": nn.Conv1d(4, 4, 3),
        "norm": nn.LayerNorm(4),
        "attention": nn.MultiheadAttention(4, 2),
        "gru": nn.GRU(4, 4),
        "scaled": Scaled(4, 4),
        "wide": nn.Linear(4, 4).double(),
        "half": nn.Linear(4, 4).half(),
        "own": nn.ParameterList([torch.ones(4)]),
        "plain": nn.Linear(4, 4, bias=False),
    }
    return nn.ModuleDict(layers)


def names(net: nn.Module, found: set[nn.Parameter]) -> set[str]:
    return {name for name, parameter in net.named_parameters() if parameter in found}


def test_weights_and_biases_of_layers_that_autocast_casts_are_found():
    net = make_net()
    assert names(net, find_autocast_weights(net)) == {
        "linear.weight",
        "linear.bias",
        "conv.weight",
        "conv.bias",
        "attention.in_proj_weight",
        "attention.in_proj_bias",
        "attention.out_proj.weight",
        "attention.out_proj.bias",
        "plain.weight",
    }


def test_a_weight_with_two_owners_is_not_among_them_and_its_layers_bias_is():
    net = nn.ModuleDict({"embed": nn.Embedding(7, 4), "head": nn.Linear(4, 7)})
    net["head"].weight = net["embed"].weight
    assert names(net, find_autocast_weights(net)) == {"head.bias"}


def test_modules_that_compute_in_float32_are_left_out():
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.MultiheadAttention(4, 2))
    assert names(net, find_autocast_weights(net, [net[0], net[1][0]])) == {
        "2.in_proj_weight",
        "2.in_proj_bias",
        "2.out_proj.weight",
        "2.out_proj.bias",
    }
    assert not find_autocast_weights(net[2], [net[2], net[2].out_proj])
    assert find_autocast_weights(net[0]) == {net[0].weight, net[0].bias}  # the module itself may be the layer
