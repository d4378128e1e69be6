"""float16 with several optimizers: weights are those of a run in float32, whatever the scale does meanwhile."""

import re

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from lightning_vram import LeanMixedPrecision

INF = float("inf")
GRADIENTS = [1.0, 2.0, -3.0, 5.0, 0.5, 4.0]


class Two(pl.LightningModule):
    """Each of two optimizers has a weight, whose gradient is what the batch says. A third one overflows now and then.

    Nothing is computed in float16, so that results are exact.
    """

    def __init__(self, steps=None, overflows=()):
        super().__init__()
        self.automatic_optimization = False
        self.weights = nn.ParameterList([nn.Parameter(torch.zeros(4)) for _ in range(3)])
        self.steps, self.overflows = steps, overflows

    def training_step(self, batch, batch_idx):
        *optimizers, third = self.optimizers()
        losses = [(batch * self.weights[0]).sum(), (batch.square() * self.weights[1]).sum()]
        self.steps(self, optimizers, losses, batch_idx)
        third.zero_grad()
        self.manual_backward(self.weights[2].sum() * (INF if batch_idx in self.overflows else 1.0))
        third.step()

    def configure_optimizers(self):
        return [torch.optim.SGD([weight], lr=0.5, momentum=0.5) for weight in self.weights]

    def train_dataloader(self):
        return DataLoader(torch.tensor(GRADIENTS), batch_size=1)


def at_different_rates(module, optimizers, losses, batch_idx):
    optimizers[0].zero_grad()
    module.manual_backward(sum(losses))
    optimizers[0].step()
    if batch_idx % 3 == 2:
        optimizers[1].step()
        optimizers[1].zero_grad()


def with_closures(module, optimizers, losses, batch_idx):
    for optimizer, loss in zip(optimizers, losses, strict=True):

        def closure(optimizer=optimizer, loss=loss):
            optimizer.zero_grad()
            module.manual_backward(loss)

        optimizer.step(closure=closure)


def clipped_between(module, optimizers, losses, batch_idx):
    for optimizer, loss in zip(optimizers, losses, strict=True):
        optimizer.zero_grad()
        module.manual_backward(loss)
        module.clip_gradients(optimizer, 2.0, "value")
    for optimizer in optimizers:
        optimizer.step()


def growing():
    """A plugin whose scale grows after each step that does not overflow."""
    return LeanMixedPrecision("fp16", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1))


@pytest.mark.parametrize("overflows", [(), (0, 2, 3)], ids=["grows", "shrinks"])
@pytest.mark.parametrize("steps", [at_different_rates, with_closures, clipped_between])
def test_weights_are_those_of_float32_while_the_scale_moves(steps, overflows, fit):
    plugin = growing()
    model = fit(lambda: Two(steps, overflows), plugins=[plugin])
    expected = fit(lambda: Two(steps))
    assert model.weights[0].any()
    for index in (0, 1):
        assert torch.equal(model.weights[index], expected.weights[index])
    assert plugin.overflow_steps == len(overflows)
    assert plugin.scaler.get_scale() != 1024


class Automatic(Two):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = True

    def training_step(self, batch, batch_idx):
        return (batch * self.weights[0]).sum() + (batch.square() * self.weights[1]).sum()

    def configure_optimizers(self):
        groups = [{"params": [weight], "lr": 0.5**index} for index, weight in enumerate(self.weights)]
        return torch.optim.SGD(groups, momentum=0.5)


def test_accumulated_gradients_are_those_of_float32_under_automatic_optimization(same_as_baseline):
    plugin = growing()
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 4.0, "gradient_clip_algorithm": "value"}
    model, _ = same_as_baseline(Automatic, plugins=[plugin], **options)
    assert model.weights[0].any()
    assert plugin.scaler.get_scale() == 1024 * 2**3


class Shared(Two):
    def configure_optimizers(self):
        return [torch.optim.SGD(self.weights[:2], lr=1.0), torch.optim.Adam(self.weights[1:])]


def test_parameters_of_two_optimizers_are_refused(fit):
    message = "LeanMixedPrecision(precision='fp16') needs one optimizer for 'weights.1', or precision='bf16'."
    with pytest.raises(MisconfigurationException, match=f"^{re.escape(message)}$"):
        fit(Shared, plugins=[LeanMixedPrecision("fp16")])
