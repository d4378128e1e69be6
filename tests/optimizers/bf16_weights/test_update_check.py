"""The share of updates that rounding takes back, by numbers that were worked out by hand."""

import pytest
import torch
from torch import nn
from torch.optim import SGD

from lightning_vram.optimizers.bf16_weights import LeanParameters
from lightning_vram.optimizers.moment_forms import UpdateCheck

STEP = 2.0**-20


def lost(scheme: str, weights: list[float], learning_rate: float = STEP, *, is_due: bool = True) -> float | None:
    weight = nn.Parameter(torch.tensor(weights))
    lean = LeanParameters([weight], scheme)
    lean.check = UpdateCheck(lambda: is_due)
    optimizer = SGD([weight], learning_rate)
    lean.attach([optimizer])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    return None if lean.check.share is None else float(lean.check.share)


@pytest.mark.parametrize(
    ("weights", "share"),
    [
        ([1.0] * 8, 0.0),  # the remainder is the update
        ([1.0 + 2.0**-9] * 8, 1.0),  # the remainder has eight bits, from 2^-9 to 2^-16
        ([1.0, 1.0, 1.0, 1.0 + 2.0**-9], 0.25),
        ([1.0, 1.0 + 2.0**-9, 2.0**10, 2.0**10], 0.5),  # float32 itself does not move the last two
    ],
)
def test_kahan_loses_what_is_below_its_sixteen_bits(weights: list[float], share: float) -> None:
    assert lost("bf16+kahan", weights) == share


def test_random_rounding_moves_as_many_as_it_should_on_average() -> None:
    share = lost("bf16+stochastic", [1.0] * 2**16, 2.0**-10)  # a quarter of the distance to the next number
    assert share == pytest.approx(0.75, abs=0.01)


def test_nothing_is_counted_where_nobody_asks_or_nothing_moves() -> None:
    assert lost("bf16+kahan", [1.0], is_due=False) is None
    assert lost("bf16+kahan", [1.0], 0.0) == 0.0
