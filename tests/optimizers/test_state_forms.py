"""Moments in fewer bytes between steps train as well as those in float32."""

from collections.abc import Callable
from itertools import cycle, islice
from statistics import mean
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.optim import AdamW

from lightning_vram.demos import ByteGPT, DigitsData, DigitsResNet, SourceText
from lightning_vram.optimizers.low_precision import LowPrecisionMoments
from lightning_vram.optimizers.moment_forms import FORMS

NUM_STEPS, NUM_LAST = 200, 20
SEEDS = range(3)


def make_gpt() -> tuple[Any, pl.LightningDataModule, Callable[..., Any], float]:
    model = ByteGPT(num_layers=2, width=64, num_heads=2, sequence_length=32, dropout=0.0)
    data = SourceText(batch_size=8, sequence_length=32, num_train_bytes=200_000)
    return model, data, lambda batch: (model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten()), 3e-3


def make_resnet() -> tuple[Any, pl.LightningDataModule, Callable[..., Any], float]:
    model = DigitsResNet()
    return model, DigitsData(), lambda batch: (model(batch[0]), batch[1]), 3e-4


def last_losses(name: Any, seed: int, make: Callable[[], Any]) -> list[float]:
    """Train a small model; what ``fsdp_offload`` and callbacks do is tested elsewhere."""
    torch.manual_seed(seed)
    model, data, compute, learning_rate = make()
    data.setup("fit")
    optimizer, losses = AdamW(model.parameters(), learning_rate), []
    if name != "fp32":
        narrow = LowPrecisionMoments(model, FORMS[name])
        narrow.attach([optimizer])
    for batch in islice(cycle(data.train_dataloader()), NUM_STEPS):
        loss = nn.functional.cross_entropy(*compute(batch))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    if name != "fp32":
        narrow.let_go()
    assert len(losses) == NUM_STEPS
    return losses[-NUM_LAST:]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("make", [make_gpt, pytest.param(make_resnet, marks=pytest.mark.minutes)])
def test_the_loss_is_that_of_float32(make: Any) -> None:
    # A single seed's loss says little: float32 runs whose weights were perturbed by 0.1 % differ by as much as those of
    # bf16, up to 0.9 % either way. So the mean over seeds is held to the bounds, and to be better is no error.
    loss = {name: mean(mean(last_losses(name, seed, make)) for seed in SEEDS) for name in ("fp32", *FORMS)}
    assert loss["bf16"] <= 1.005 * loss["fp32"], loss
    assert loss["8bit"] <= 1.02 * loss["fp32"], loss
    assert loss["4bit"] <= 1.05 * loss["fp32"], loss


@pytest.mark.parametrize(("name", "nine_of_ten"), [("8bit", 0.25), ("4bit", 1.0)])
def test_an_average_over_a_thousand_steps_is_where_it_should_be_and_follows(name: Any, nine_of_ten: float) -> None:
    # It moves by a thousandth in a step, which is less than half of what its form tells apart.
    generator = torch.Generator().manual_seed(0)
    sigma = 10 ** -(1.5 * torch.rand(128 * 10, generator=generator))
    form, average = FORMS[name], torch.zeros(128 * 10)
    true = torch.zeros(128 * 10)
    for step in range(1, 1201):
        decade = 1.0 if step <= 600 else 0.1
        square = (torch.randn(average.shape, generator=generator) * sigma * decade).square()
        true.lerp_(sigma.square() * decade**2, 0.001)
        kept = form.empty("exp_avg_sq", average)
        kept.copy_(form.round("exp_avg_sq", average.lerp(square, 0.001), 0, (step, 0), None))
        average = kept + 0
        if step in (600, 1200):
            roots = (average / true).sqrt().log().abs()
            assert roots.median() < nine_of_ten / 2
            assert roots.quantile(0.9) < nine_of_ten
            assert (average.sqrt().sum() / true.sqrt().sum()).log().abs() < nine_of_ten / 5
