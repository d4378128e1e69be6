"""Which generator an operator draws from, on any device."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_vram.core.random_state import default_source
from lightning_vram.techniques.in_place_fusion import recipes
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation

XPU = torch.device("xpu", 1)


def pretend(monkeypatch, **functions):
    """Let there be accelerators with a module of these functions."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**functions))


def test_the_generator_of_an_accelerator_is_its_own(monkeypatch):
    states = {XPU: "first"}
    pretend(monkeypatch, get_rng_state=states.get, set_rng_state=lambda state, device: states.update({device: state}))
    read, write = default_source(XPU)
    assert read() == "first"
    write("second")
    assert states == {XPU: "second"}


def test_a_device_that_is_alone_takes_no_name(monkeypatch):
    pretend(monkeypatch, get_rng_state=lambda: "state", set_rng_state=lambda state: None)
    assert default_source(torch.device("mps"))[0]() == "state"


@pytest.mark.parametrize("functions", [{}, {"is_initialized": lambda: False}])
def test_a_device_without_a_generator_that_can_be_set_has_none(monkeypatch, functions):
    pretend(monkeypatch, **functions)
    assert default_source(XPU) is None


def train(*stages):
    """Return the results and gradients of two forwards, whose masks differ."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5), nn.ReLU(), nn.Linear(64, 64))
    x = torch.randn(64, 64)
    results = []
    for _ in range(2):
        with stages[0] if stages else torch.enable_grad():
            results.append(net(x))
        results[-1].square().sum().backward()
    return [*results, *(parameter.grad for parameter in net.parameters())]


def test_where_no_generator_can_be_set_the_mask_is_kept(monkeypatch):
    monkeypatch.setattr(recipes, "default_source", lambda device: None)
    kept, replayed = Recomputation(min_bytes=0), Recomputation(min_bytes=0, dropout="replay")
    plain = train()
    assert all(map(torch.equal, train(kept), plain))
    assert all(map(torch.equal, train(replayed), plain))
    assert replayed.report.kept_bytes == kept.report.kept_bytes
