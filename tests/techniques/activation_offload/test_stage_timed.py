"""On a device whose bus takes as long as it is told to: a limit of what the bus carries leaves the step its time."""

import pytest
import torch
from support.timed_machine import TimedMachine

from lightning_vram.techniques.activation_offload.stage import ActivationOffloading

SIDE = 32
MATRIX = SIDE * SIDE * 4
NUM_LAYERS = 32  # each takes a second, and two in the backward, and saves a matrix
COMPUTE_SECONDS = 3.0 * NUM_LAYERS


def fit(matrices_per_second: float, most_bytes: int | None) -> tuple[float, int]:
    """Return how much longer the fifth step takes for the copies, and how many matrices are offloaded in it."""
    torch.manual_seed(0)
    machine = TimedMachine(matrices_per_second * MATRIX, matrices_per_second * MATRIX)
    weight = torch.randn(SIDE, SIDE).requires_grad_()

    def run() -> torch.Tensor:
        x = weight
        for _ in range(NUM_LAYERS):
            x = machine.layer(x, 1.0)
        return x.sum()

    with machine.installed():
        (plain,) = torch.autograd.grad(run(), weight)
        offloading = ActivationOffloading(min_offload_bytes=1, most_bytes=most_bytes)
        for _ in range(5):
            start = machine.compute.seconds
            with offloading:
                loss = run()
            assert torch.equal(torch.autograd.grad(loss, weight)[0], plain)
    assert machine.num_synchronized == 0
    return (machine.compute.seconds - start) / COMPUTE_SECONDS, offloading.report.num_offloaded


@pytest.mark.parametrize(("matrices_per_second", "num_sent"), [(0.5, 16), (0.25, 8), (0.1, 3), (0.01, 0)])
def test_a_slow_bus_has_time_for_what_it_carries_in_a_forward(matrices_per_second: float, num_sent: int) -> None:
    slowdown, num_offloaded = fit(matrices_per_second, most_bytes=None)
    assert num_offloaded == NUM_LAYERS - 2  # two are the window
    assert slowdown > 1.25
    assert fit(matrices_per_second, most_bytes=num_sent * MATRIX) == (1.0, num_sent)


def test_a_fast_bus_has_time_for_everything() -> None:
    assert fit(2, most_bytes=None) == (1.0, NUM_LAYERS - 2)
