"""Generators go on where they were."""

import io
import random
import sys

import numpy
import pytest
import torch

from lightning_vram.core.random_state import read_global_states, write_global_states

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


class FakeDevice:
    """An accelerator with one number for a generator."""

    def __init__(self) -> None:
        self.state, self.is_in_use = torch.tensor([5]), True

    def is_initialized(self) -> bool:
        return self.is_in_use

    def get_rng_state(self, device: torch.device) -> torch.Tensor:
        assert device == torch.device("cuda", 1)
        return self.state

    def set_rng_state(self, state: torch.Tensor, device: torch.device) -> None:
        assert device == torch.device("cuda", 1)
        self.state = state


def test_the_device_of_this_rank_has_a_generator_too(monkeypatch):
    fake, device = FakeDevice(), torch.device("cuda", 1)
    monkeypatch.setattr(torch, "get_device_module", lambda device: fake)
    states = read_global_states(device)
    assert states["cuda"] == 5
    fake.state = torch.tensor([6])
    write_global_states(states, CPU)
    assert fake.state == 6
    write_global_states({name: state for name, state in states.items() if name != "cuda"}, device)
    assert fake.state == 6
    write_global_states(states, device)
    assert fake.state == 5
    fake.is_in_use = False
    assert "cuda" not in read_global_states(device)
