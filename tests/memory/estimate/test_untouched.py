"""Weights of any size that take no memory."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from support.helpers import TinyGPT
from torch import nn

from lightning_vram.memory.estimate.fake_device import UntouchedWeights

MIB = 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_large_weights_take_no_memory():
    with UntouchedWeights():
        layer = nn.Linear(16, 16)  # what is loaded at the first time
        before = resident_bytes()
        layers = [nn.Linear(8192, 8192) for _ in range(8)]
        layers += [copy.deepcopy(layers[0]), nn.Embedding(8192, 8192)]
        drawn = torch.randn(8192, 8192)
        truncated = nn.init.trunc_normal_(torch.empty(8192, 8192), std=0.02)
    assert resident_bytes() - before < 128 * MIB  # half of one of them; what other tests left goes on
    assert layer.weight.abs().sum() > 0
    assert drawn.shape == truncated.shape == (8192, 8192)


def test_small_tensors_have_their_values():
    def make() -> TinyGPT:
        torch.manual_seed(0)
        return TinyGPT()

    plain = make()
    with UntouchedWeights():
        small = make()
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 3)]
        drawn = torch.randn(3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), small.parameters(), strict=True))
    assert rates == [0.0, 0.25, 0.5]
    assert torch.equal(drawn, torch.randn(3, generator=torch.Generator().manual_seed(1), dtype=torch.float64))


def test_it_ends_with_the_block():
    with UntouchedWeights():
        pass
    assert nn.Linear(1024, 1024).weight.abs().sum() > 0
