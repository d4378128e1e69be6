"""Norms that see a batch in parts count one batch."""

import pytest
import torch
from torch import nn

from lightning_vram.techniques.micro_batching import NormCounting


def run(norm: nn.Module, parts: list[torch.Tensor]) -> None:
    with NormCounting(norm, sum(map(len, parts))) as counting:
        for part in parts:
            counting.begin_part(len(part), 0.0)
            norm(part)


@pytest.mark.parametrize("momentum", [0.1, 0.7])
@pytest.mark.parametrize("sizes", [[4, 4], [3, 3, 2], [8]], ids=str)
def test_equal_parts_move_the_statistics_as_the_whole_does(momentum: float, sizes: list[int]):
    """Parts with the same mean and variance: then only forgetting could differ."""
    rows = torch.tensor([[1.0], [3.0]], dtype=torch.float64)
    parts = [rows.repeat(size, 1) for size in sizes]
    whole, split = (nn.BatchNorm1d(1, momentum=momentum).double() for _ in range(2))
    for _ in range(3):
        whole(torch.cat(parts))
        run(split, parts)
    assert torch.allclose(split.running_mean, whole.running_mean, rtol=0, atol=1e-14)
    assert split.num_batches_tracked == whole.num_batches_tracked == 3
    assert split.momentum == momentum


def test_a_cumulative_average_counts_every_part():
    norm = nn.BatchNorm1d(1, momentum=None)
    run(norm, [torch.tensor([[0.0], [2.0]]), torch.tensor([[2.0], [4.0]])])
    assert norm.running_mean == 2.0
    assert norm.num_batches_tracked == 2


def test_a_norm_that_does_not_run_and_a_frozen_one_stay():
    frozen, idle = nn.BatchNorm1d(1).eval(), nn.BatchNorm1d(1)
    with NormCounting(nn.ModuleList([frozen, idle]), 4) as counting:
        counting.begin_part(2, 0.5)
        frozen(torch.ones(2, 1))
    assert frozen.num_batches_tracked == idle.num_batches_tracked == 0
    assert frozen.momentum == idle.momentum == 0.1
