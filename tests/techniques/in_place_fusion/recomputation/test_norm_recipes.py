"""A batch norm is made again by a formula where that gives the bits of its kernel, which is tried in small pieces."""

import pytest
import torch
from support.helpers import TinyCNN
from torch import Tensor

from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.techniques.in_place_fusion.policy import Fusion, FusionPolicy
from lightning_vram.techniques.in_place_fusion.recomputation import recipes


@pytest.fixture(autouse=True)
def try_again():
    """Forget what earlier tests have tried in this process."""
    recipes._formula_is_exact.cache_clear()
    yield
    recipes._formula_is_exact.cache_clear()


def measure_steps(num_steps: int) -> list[int]:
    """Peaks of the training steps of a small network with batch norms; its maps have 32 KiB."""
    torch.manual_seed(0)
    net, images = TinyCNN(), torch.randn(4, 3, 16, 16)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    fusion = Fusion(net, FusionPolicy(), lambda sentence: None)
    peaks = []
    for _ in range(num_steps):
        with track_memory(net, inputs=images) as tracker:
            with fusion.step():
                loss = net(images).square().sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del loss
        peaks.append(tracker.timeline.peak_bytes)
    fusion.remove()
    return peaks


def test_the_first_step_has_the_peak_of_the_second():
    first, *others = measure_steps(3)
    assert others == [first] * 2
    assert recipes._formula_is_exact.cache_info().currsize == 1  # it was tried in one of them


@pytest.mark.parametrize("dim", [2, 3, 4, 5, "channels last"])
def test_a_formula_that_rounds_once_more_is_refused(dim, monkeypatch):
    def multiply_and_add(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        scale, shape = deviation * weight, [1, -1, *[1] * (x.dim() - 2)]
        return x * scale.view(shape) + (bias - mean * scale).view(shape)

    monkeypatch.setattr(recipes, "_normalise", multiply_and_add)
    assert not recipes._formula_is_exact(4 if dim == "channels last" else dim, True, True, dim == "channels last")


def test_a_million_numbers_are_tried_a_few_at_a_time(monkeypatch):
    sizes = []

    def note(x: Tensor, weight: Tensor, bias: Tensor, *_: Tensor) -> Tensor:
        sizes.append(x.numel())
        return torch.nn.functional.batch_norm(x, None, None, weight, bias, training=True)

    monkeypatch.setattr(recipes, "_normalise", note)
    for dim in (2, 3, 4, 5):
        assert recipes._formula_is_exact(dim, True, True, False)
        assert sum(sizes) >= 1_000_000
        assert max(sizes) <= 2500
        sizes.clear()
