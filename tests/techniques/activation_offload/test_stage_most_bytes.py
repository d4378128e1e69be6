"""At most so many bytes of a forward travel, those saved first; what stays makes no difference but to memory."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from lightning_vram.techniques.activation_offload.stage import ActivationOffloading

SIDE = 64
MATRIX = SIDE * SIDE * 4


def make(most_bytes: int | None, **arguments: Any) -> ActivationOffloading:
    return ActivationOffloading(min_offload_bytes=1, most_bytes=most_bytes, **({"window_bytes": 0} | arguments))


def weight() -> Tensor:
    torch.manual_seed(0)
    return torch.randn(SIDE, SIDE).requires_grad_()


def sines(x: Tensor) -> Tensor:
    """Save eight matrices: ``x``, and seven results."""
    for _ in range(8):
        x = x.sin()
    return x


@pytest.mark.parametrize(
    ("most_bytes", "num_sent"),
    [(None, 8), (0, 0), (MATRIX - 1, 0), (MATRIX, 1), (3 * MATRIX + 1, 3), (8 * MATRIX, 8), (10**9, 8)],
)
def test_what_is_saved_first_travels_from_the_first_forward_on(most_bytes: int | None, num_sent: int) -> None:
    x = weight()
    (expected,) = torch.autograd.grad(sines(x).sum(), x)
    offloading = make(most_bytes)
    for _ in range(3):
        with offloading:
            loss = sines(x).sum()
        assert offloading.report.offloaded_bytes == num_sent * MATRIX
        assert offloading.report.kept_bytes == (8 - num_sent) * MATRIX
        assert offloading.num_away == offloading.report.num_offloaded == num_sent
        assert torch.equal(torch.autograd.grad(loss, x)[0], expected)
        del loss
        assert offloading.num_away == 0


def test_the_window_comes_out_of_what_may_travel() -> None:
    x = weight()
    offloading = make(7 * MATRIX, window_bytes=2 * MATRIX)
    for sent in (7, 6, 6):
        with offloading:
            loss = sines(x).sum()
        assert offloading.report.offloaded_bytes == sent * MATRIX
        loss.backward()


def test_each_forward_of_a_step_has_its_own_limit() -> None:
    """A generator and a discriminator, say: forward, backward, forward, backward."""
    x = weight()
    (expected,) = torch.autograd.grad(sines(x).sum(), x)
    offloading = make(3 * MATRIX)
    with offloading:
        for num_forwards in (1, 2):
            loss = sines(x).sum()
            assert offloading.report.offloaded_bytes == num_forwards * 3 * MATRIX
            assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_it_may_be_set_between_steps() -> None:
    x = weight()
    offloading = make(None)
    for most_bytes, num_sent in ((None, 8), (2 * MATRIX, 2), (0, 0), (None, 8)):
        offloading.most_bytes = most_bytes
        with offloading:
            sines(x).sum().backward()
        assert offloading.report.num_offloaded == num_sent


def test_the_inputs_of_checkpoints_count_and_second_runs_do_not() -> None:
    x = weight()
    (expected,) = torch.autograd.grad(sines(sines(x)).sum(), x)
    offloading = make(MATRIX)
    for _ in range(2):
        with offloading:
            hidden = checkpoint(sines, checkpoint(sines, x, use_reentrant=False), use_reentrant=False)
            assert torch.equal(torch.autograd.grad(hidden.sum(), x)[0], expected)
        assert offloading.report.offloaded_bytes == offloading.report.kept_bytes == MATRIX
