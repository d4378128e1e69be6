"""Norms, dropout, recurrent layers, convolutions and optimizers: what CUDA's kernels keep, worked out by hand."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_vram.memory.tracking.tracker import track_memory


def saved_bytes(run):
    with track_memory() as tracker:
        result = run()
    assert result is not None
    return tracker.timeline.on("lazy:0").saved_for_backward_bytes


# Four steps of three samples, five features in, eight hidden.
@pytest.mark.parametrize(
    ("kind", "num_layers", "directions", "reserve"),
    [
        (nn.LSTM, 4, 1, 12 * 8 * (4 * 5 + 3)),
        (nn.GRU, 4, 1, 12 * 8 * (4 * 6 + 3)),
        (nn.LSTM, 2, 2, 2 * 12 * 8 * (2 * 5 + 1)),
        (nn.RNN, 1, 1, 12 * 8),
    ],
)
def test_recurrent_layers_keep_results_ends_and_cudnns_reserve(card, kind, num_layers, directions, reserve):
    notes = card()
    layers = kind(5, 8, num_layers, bidirectional=directions == 2, device="cuda")
    x = torch.empty(4, 3, 5, device="cuda", requires_grad=True)
    ends = num_layers * directions * 3 * 8
    num_states = 2 if kind is nn.LSTM else 1
    numbers = 12 * 8 * directions + 2 * ends * num_states + reserve  # the module makes zeros to begin with
    assert saved_bytes(lambda: layers(x)) == 4 * numbers
    layers(x)[0].sum().backward()
    assert layers.weight_hh_l0.grad.shape == layers.weight_hh_l0.shape
    assert list(notes) == ["nn.LSTM, nn.GRU, nn.RNN: memory that cuDNN saves for backward is a rough estimate."]


@pytest.mark.parametrize("which", ["input", "weight"])
def test_convolutions_are_channels_last_as_soon_as_input_or_weight_is(card, which):
    card()
    layer, x = nn.Conv2d(3, 4, 3, device="cuda"), torch.empty(2, 3, 8, 8, device="cuda")
    assert layer(x).is_contiguous()
    if which == "input":
        x = x.to(memory_format=torch.channels_last)
    else:
        layer.weight.data = layer.weight.data.to(memory_format=torch.channels_last)
    assert layer(x).is_contiguous(memory_format=torch.channels_last)
    assert F.conv2d(x.double(), layer.weight.double()).is_contiguous()


def step_bytes(make_optimizer):
    """Bytes that come and go in a second step over two layers of 64 x 64."""
    layers = nn.ModuleList(nn.Linear(64, 64, bias=False, device="cuda") for _ in range(2))
    optimizer = make_optimizer(layers.parameters())
    for _ in range(2):
        for parameter in layers.parameters():
            parameter.grad = torch.empty_like(parameter)
        with track_memory() as tracker:
            optimizer.step()
    timeline = tracker.timeline.on("lazy:0")
    return timeline.peak_bytes - timeline.live_bytes


@pytest.mark.parametrize(
    ("make_optimizer", "num_bytes"),
    [
        (lambda parameters: torch.optim.AdamW(parameters, capturable=True), 2 * 64 * 64 * 4),  # roots of both at once
        (lambda parameters: torch.optim.AdamW(parameters, fused=True), 0),
        (lambda parameters: torch.optim.SGD(parameters, 0.1, 0.9), 0),
    ],
)
def test_optimizers_step_as_on_cuda(card, make_optimizer, num_bytes):
    card()
    assert num_bytes <= step_bytes(make_optimizer) < num_bytes + 100  # and numbers of steps
