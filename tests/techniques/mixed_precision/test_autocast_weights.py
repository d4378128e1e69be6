"""Weights that are read in 16 bit alone: those of stock layers that nobody else owns."""

import torch
from torch import nn

from lightning_vram.techniques.mixed_precision.weight_casts import find_autocast_weights


class Scaled(nn.Linear):
    """Has a forward of its own, which may read its weight in any way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.weight.sum()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.linear = nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 4, 3)
        self.norm = nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.gru = nn.GRU(4, 4)
        self.scaled = Scaled(4, 4)
        self.wide = nn.Linear(4, 4).double()
        self.half = nn.Linear(4, 4).half()
        self.own = nn.Parameter(torch.ones(4))
        self.plain = nn.Linear(4, 4, bias=False)


def names(net: nn.Module, found: set[nn.Parameter]) -> set[str]:
    return {name for name, parameter in net.named_parameters() if parameter in found}


def test_weights_and_biases_of_layers_that_autocast_casts_are_found():
    net = Net()
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
    assert not names(nn.Sequential(net[2]), find_autocast_weights(net[2], [net[2], net[2].out_proj]))


def test_the_module_itself_may_be_the_layer():
    linear = nn.Linear(2, 2)
    assert find_autocast_weights(linear) == {linear.weight, linear.bias}
