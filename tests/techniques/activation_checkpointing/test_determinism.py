"""A second run that is not what the first was is an error that says what to do; what merely rounds otherwise is not."""

import itertools
import random
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_vram.core.recomputed_saves import RecomputationError
from lightning_vram.techniques.activation_checkpointing.apply import apply_activation_checkpointing
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy

GENERATOR = np.random.default_rng(0)  # nobody's state: neither a module's nor NumPy's own
COUNTER = itertools.count()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.noise(self.linear(hidden)))

    def noise(self, hidden: Tensor) -> Tensor:
        return hidden


class ForeignMask(Block):
    def noise(self, hidden: Tensor) -> Tensor:
        return hidden * torch.from_numpy(GENERATOR.integers(2, size=tuple(hidden.shape))).to(hidden)


class ForeignScale(Block):
    def noise(self, hidden: Tensor) -> Tensor:
        return hidden * (1 + next(COUNTER))


class ForeignPath(Block):
    def noise(self, hidden: Tensor) -> Tensor:
        return hidden.sin().cos() if next(COUNTER) % 2 else hidden.sin()


class KnownRandomness(Block):
    def noise(self, hidden: Tensor) -> Tensor:
        scale = random.random() + float(np.random.random()) + float(torch.rand(()))
        return nn.functional.dropout(hidden * scale, 0.5)


class Rounding(Block):
    """As atomic additions in a different order."""

    def noise(self, hidden: Tensor) -> Tensor:
        return hidden * (1 + 1e-6 * (next(COUNTER) % 2))


class NotANumber(Block):
    def noise(self, hidden: Tensor) -> Tensor:
        return hidden + torch.tensor([float("nan"), float("inf")] * 4)


def loss_of(make_block, *, check: str, save: SavePolicy | None = None) -> Tensor:
    global COUNTER
    COUNTER = itertools.count()
    model = nn.Sequential(make_block(), make_block())
    apply_activation_checkpointing(model, layers=make_block.__name__, determinism_check=check, save=save)
    return model(torch.randn(4, 8)).square().sum()


@pytest.mark.parametrize("save", [None, SavePolicy("matmuls")], ids=["inputs", "matmuls"])
@pytest.mark.parametrize("make_block", [ForeignMask, ForeignScale, ForeignPath])
def test_a_layer_that_depends_on_something_nobody_rewinds_is_an_error(make_block, save):
    loss = loss_of(make_block, check="outputs", save=save)
    with pytest.raises(
        RecomputationError,
        match=rf"^recomputation of layer 1 \({make_block.__name__}\) diverged from the forward: .*Gradients would be "
        r"wrong\. .* determinism_check='operators' names the operator",
    ):
        loss.backward()


@pytest.mark.parametrize(
    ("make_block", "difference"),
    [
        (ForeignMask, r"aten\.lift_fresh\.default, returned other values than it returns now"),
        (ForeignScale, r"aten\.mul\.Tensor, returned other values than it returns now"),
        (ForeignPath, r"operator \d+ was aten\.tanh\.default -> .* and is aten\.cos\.default"),
    ],
)
def test_the_operator_that_differs_is_named_on_request(make_block, difference):
    loss = loss_of(make_block, check="operators")
    global COUNTER
    COUNTER = itertools.chain([1] if make_block not in (ForeignScale,) else [5], itertools.count(1))
    with pytest.raises(RecomputationError, match=difference):
        loss.backward()


@pytest.mark.parametrize("check", ["outputs", "operators"])
@pytest.mark.parametrize("make_block", [Block, KnownRandomness, Rounding, NotANumber])
def test_no_false_alarm(make_block, check):
    loss_of(make_block, check=check).backward()


def test_looks_at_nothing_if_told_so():
    loss_of(ForeignMask, check="none").backward()


@pytest.mark.parametrize("first", [1, 2, 3, 4, 8])
def test_calls_1_2_4_8_of_each_layer_are_compared(first):
    """A difference that lasts is found; one in calls between them only is not: documented."""
    model = nn.Sequential(Late())
    apply_activation_checkpointing(model, layers="Late")
    for call in range(1, 9):
        model[0].is_noisy = call == first
        output = model(torch.randn(4, 8))
        with pytest.raises(RecomputationError) if call == first and call in (1, 2, 4, 8) else nullcontext():
            output.sum().backward()


class Late(ForeignMask):
    is_noisy = False

    def noise(self, hidden: Tensor) -> Tensor:
        return super().noise(hidden) if self.is_noisy else hidden


class ZeroBranch(ForeignScale):
    """A branch whose last weight starts at zero: the output tells nothing of what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 8)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.last(super().forward(hidden))


def test_a_difference_behind_a_weight_of_zero_is_found_at_once():
    with pytest.raises(RecomputationError, match="has other values"):
        loss_of(ZeroBranch, check="outputs").backward()


@pytest.mark.parametrize("make", [lambda: nn.LSTM(8, 8), lambda: nn.RReLU()])
def test_no_false_alarm_where_kernels_save_what_they_did_not_set(make):
    class Other(Block):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make()

        def noise(self, hidden: Tensor) -> Tensor:
            output = self.inner(hidden)
            return output[0] if isinstance(output, tuple) else output

    for _ in range(5):
        loss_of(Other, check="outputs").backward()
