"""Generators go on where they were, and which one an operator draws from, on any device."""

import io
import random
import sys
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from lightning_vram.core.random_state import default_source, read_global_states, write_global_states
from lightning_vram.techniques.in_place_fusion import recipes
from lightning_vram.techniques.in_place_fusion.recomputation import Recomputation

CPU = torch.device("cpu")


def draw() -> list[float]:
    return [random.random(), random.gauss(0, 1), numpy.random.rand(), numpy.random.randn(), torch.rand(1).item()]


@pytest.mark.parametrize("num_gauss", [0, 1])  # of two that are drawn at once one is kept
def test_generators_go_on_where_they_were_by_states_that_are_loaded_without_running_code(num_gauss):
    for _ in range(num_gauss):
        random.gauss(0, 1)
        numpy.random.randn()
    file = io.BytesIO()
    torch.save(read_global_states(CPU), file)
    expected = draw()
    assert draw() != expected
    file.seek(0)
    write_global_states(torch.load(file, weights_only=True), CPU)
    assert draw() == expected


def test_numpy_is_not_needed(monkeypatch):
    states = read_global_states(CPU)
    expected = draw()
    monkeypatch.delitem(sys.modules, "numpy")
    without = read_global_states(CPU)
    assert set(without) == {"python", "torch"}
    write_global_states(states, CPU)
    monkeypatch.undo()
    assert draw()[:2] == expected[:2]
    write_global_states(without, CPU)


def test_the_device_of_this_rank_has_a_generator_too(monkeypatch):
    device = torch.device("cuda", 1)
    states = {device: torch.tensor([5])}
    fake = SimpleNamespace(
        is_initialized=lambda: True,
        get_rng_state=states.__getitem__,
        set_rng_state=lambda state, device: states.update({device: state}),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    read = read_global_states(device)
    assert read["cuda"] == 5
    states[device] = torch.tensor([6])
    write_global_states(read, CPU)
    write_global_states({name: state for name, state in read.items() if name != "cuda"}, device)
    assert states == {device: 6}
    write_global_states(read, device)
    assert states == {device: 5}
    fake.is_initialized = lambda: False
    assert "cuda" not in read_global_states(device)


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
