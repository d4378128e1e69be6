"""A graph behind the outputs of a step: what it holds and where it begins."""

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu

from lightning_vram.techniques.early_release import HeldGraph, find_held_graph

BATCH, WIDTH = 8, 16
MAP_BYTES = BATCH * WIDTH * 4


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * gradient * x


def net() -> nn.Sequential:
    return nn.Sequential(nn.Identity(), nn.Linear(WIDTH, WIDTH), nn.Sigmoid(), nn.Linear(WIDTH, WIDTH))


def test_bytes_are_those_that_are_saved_without_parameters():
    layers = net()
    outputs = layers(torch.randn(BATCH, WIDTH))  # keeps the input, and the sigmoid's result once for both its readers
    assert find_held_graph({"logits": [outputs]}, layers) == HeldGraph(2 * MAP_BYTES, "1")


def test_a_view_that_was_made_without_a_graph_keeps_that_of_its_base():
    layers = net()
    outputs = layers(torch.randn(BATCH, WIDTH))
    with torch.no_grad():
        view = outputs.flatten()
    assert view.grad_fn is None
    assert find_held_graph(view, layers) == HeldGraph(2 * MAP_BYTES, "1")
    assert find_held_graph(outputs.detach().flatten(), layers) is None


def test_a_function_written_in_python_is_read():
    layers = net()
    outputs = Squared.apply(layers(torch.randn(BATCH, WIDTH)))
    assert find_held_graph(outputs, layers) == HeldGraph(3 * MAP_BYTES, "1")


def test_what_hooks_have_packed_is_read():
    layers = net()
    with save_on_cpu():
        outputs = layers(torch.randn(BATCH, WIDTH))
    assert find_held_graph(outputs, layers) is not None


def test_a_graph_of_an_input_names_no_layer():
    x = torch.randn(BATCH, WIDTH, requires_grad=True)
    assert find_held_graph(x.exp(), net()) == HeldGraph(MAP_BYTES, None)


def test_no_graph_or_one_that_holds_nothing_is_none():
    layers = net()
    outputs = layers(torch.randn(BATCH, WIDTH))
    assert find_held_graph((outputs.detach(), 1, "text", None, layers[1].weight), layers) is None
    assert find_held_graph(layers[1].weight + 1, layers) is None
    outputs.sum().backward()
    assert find_held_graph(outputs, layers) is None  # freed
