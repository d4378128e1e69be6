"""The share of updates of moments that rounding takes back, by a number that was worked out by hand."""

import torch
from torch import nn
from torch.optim import SGD

from lightning_vram.optimizers.low_precision import LowPrecisionMoments
from lightning_vram.optimizers.moment_forms import FORMS, UpdateCheck


def test_what_is_below_half_a_distance_is_lost() -> None:
    weights = nn.ParameterList([nn.Parameter(torch.zeros(32, 128))])
    is_due, optimizer = [True], SGD(weights, lr=1.0, momentum=1.0)
    check = UpdateCheck(lambda: is_due[0])
    LowPrecisionMoments(weights, FORMS["8bit"], check=check).attach([optimizer])
    assert check.share is None
    # In a block whose largest number is 1 the next ones are (127 / 128)^2, 0.0156 below, and so on.
    moved = torch.cat([torch.zeros(1), torch.full((63,), -1e-3), torch.full((64,), -0.5)]).expand(32, 128)
    for gradient in (torch.ones(32, 128), moved):
        check.begin()
        weights[0].grad = gradient.clone()
        optimizer.step()
    assert float(check.share) == torch.tensor(63 / 127)
    is_due[0] = False
    check.begin()
    optimizer.step()
    assert check.share is None
