"""``rrelu`` saves noise that its kernel has not drawn yet: whoever copies it too early has garbage for a gradient."""

from contextlib import ExitStack
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_vram.techniques.activation_checkpointing.apply import apply_activation_checkpointing
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy
from lightning_vram.techniques.activation_compression.stage import CompressionStage
from lightning_vram.techniques.activation_offload.stage import ActivationOffloading
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation

SIDE = 64


offloading = partial(ActivationOffloading, min_offload_bytes=1, window_bytes=0)
compression = partial(CompressionStage, min_bytes=1)
recomputation = partial(Recomputation, min_bytes=1)


def own_noise(x):
    noise = torch.full_like(x, torch.nan, requires_grad=False)
    return torch.ops.aten.rrelu_with_noise(x, noise, 0.1, 0.3, True)


ACTIVATIONS = {
    "function": lambda x: F.rrelu(x, training=True),
    "in place": lambda x: F.rrelu(x, training=True, inplace=True),
    "with noise of one's own": own_noise,
    "and more": lambda x: F.rrelu(x, training=True).sin() + 1,
}


class Block(nn.Module):
    def __init__(self, activation):
        super().__init__()
        self.linear, self.activation = nn.Linear(SIDE, SIDE), activation

    def forward(self, x):
        return self.activation(self.linear(x))


def gradients(activation, stages=(), **checkpointing):
    """Of two steps: what a layer does in its first call is no rule for the others."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Block(activation) for _ in range(2)))
    if checkpointing:
        apply_activation_checkpointing(net, layers="Block", **checkpointing)
    stages = [make() for make in stages]
    for _ in range(2):
        garbage = [torch.full((SIDE, SIDE), 1e30) for _ in range(8)]
        x = torch.randn(SIDE, SIDE)
        del garbage  # what memory holds that is used again
        with ExitStack() as stack:
            for stage in stages:
                stack.enter_context(stage)
            loss = net(x).square().sum()
        loss.backward()
    return [parameter.grad for parameter in net.parameters()]


def assert_equal(ones, others):
    assert all(torch.equal(one, other) for one, other in zip(ones, others, strict=True))


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_the_noise_of_rrelu_is_taken_when_it_is_drawn(activation):
    plain = gradients(activation)
    for stages in ([offloading], [compression], [recomputation], [offloading, compression, recomputation]):
        assert_equal(gradients(activation, stages), plain)


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_a_second_run_draws_the_noise_that_it_needs_last(activation):
    plain = gradients(activation)
    for checkpointing in ({"determinism_check": "none"}, {"save": SavePolicy("matmuls")}):
        assert_equal(gradients(activation, **checkpointing), plain)
        assert_equal(gradients(activation, [offloading], **checkpointing), plain)


def test_recipes_that_end_on_data_read_what_it_was_before_a_write():
    def gradient(*stages):
        torch.manual_seed(0)
        weight, data = torch.randn(SIDE, SIDE, requires_grad=True), torch.randn(SIDE, SIDE)
        with ExitStack() as stack:
            for make in stages:
                stack.enter_context(make())
            (weight * data).sum()  # saves the data, for a backward that never comes
            shifted = data + 1
            data.mul_(2)
            y = weight * shifted
        y.sum().backward()
        return [weight.grad]

    assert_equal(gradient(offloading, recomputation), gradient())
