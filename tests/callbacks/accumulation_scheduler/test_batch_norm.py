"""AccumulationScheduler: running statistics keep the pace of whole windows."""

import copy
import warnings

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_vram.callbacks.accumulation_scheduler.callback import AccumulationScheduler
from lightning_vram.callbacks.micro_batching.callback import MicroBatching

MOMENTUM = 0.2
WARNING = (
    "AccumulationScheduler: batch norm normalizes each micro-batch separately in {names}. Running statistics "
    "are {statistics}. Larger micro-batches, GroupNorm or frozen batch norm avoid this."
)


class Normed(pl.LightningModule):
    def __init__(self, num_batches=6):
        super().__init__()
        self.net = nn.Sequential(
            nn.BatchNorm1d(2, momentum=MOMENTUM), nn.Linear(2, 2), nn.BatchNorm1d(2, momentum=None)
        )
        self.double()
        generator = torch.Generator().manual_seed(0)
        self.samples = torch.randn(4 * num_batches, 2, dtype=torch.float64, generator=generator)

    def training_step(self, batch, batch_idx):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def train_dataloader(self):
        return DataLoader(self.samples, batch_size=4)


@pytest.fixture
def fit(make_trainer):
    def run(model, callback, *others):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(callbacks=[callback, *others], limit_val_batches=0, max_epochs=1).fit(model)
        return [str(warning.message) for warning in caught if "Accumulation" in str(warning.message)]

    return run


def test_running_mean_of_a_window_moves_as_by_one_batch(fit):
    """Four micro-batches and a last window of two; each share adds up to the weight of one update."""
    model = Normed()
    assert fit(model, AccumulationScheduler({0: 4})) == [
        WARNING.format(names="net.0 and 1 more", statistics="corrected")
    ]
    batches = model.samples.split(4)
    expected = torch.zeros(2, dtype=torch.float64)
    for window in (batches[:4], batches[4:]):
        momentum = 1 - (1 - MOMENTUM) ** (1 / len(window))
        for batch in window:
            expected = (1 - momentum) * expected + momentum * batch.mean(0)
    assert torch.allclose(model.net[0].running_mean, expected, rtol=0, atol=1e-12)
    assert model.net[0].momentum == MOMENTUM


def test_the_correction_can_be_turned_off(fit):
    model = Normed()
    plain = copy.deepcopy(model)
    statistics = "not corrected (correct_batch_norm=False)"
    told = fit(model, AccumulationScheduler({0: 3}, correct_batch_norm=False))
    assert told == [WARNING.format(names="net.0 and 1 more", statistics=statistics)]
    for batch in model.samples.split(4):
        plain.net[0](batch)
    assert torch.equal(model.net[0].running_mean, plain.net[0].running_mean)


def test_nothing_is_said_or_done_where_nothing_accumulates_or_norms_are_frozen(fit):
    model = Normed()
    plain = copy.deepcopy(model)
    assert fit(model, AccumulationScheduler({0: 1})) == []
    for batch in model.samples.split(4):
        plain.net[0](batch)
    assert torch.equal(model.net[0].running_mean, plain.net[0].running_mean)
    frozen = Normed()
    frozen.net.eval()
    assert fit(frozen, AccumulationScheduler({0: 2})) == []
    assert torch.equal(frozen.net[0].running_mean, torch.zeros(2))


@pytest.mark.parametrize("is_first", [True, False])
def test_parts_of_micro_batches_share_the_momentum_again(is_first, fit):
    model, callbacks = Normed(), [AccumulationScheduler({0: 2}), MicroBatching(2)]
    fit(model, *(callbacks if is_first else callbacks[::-1]))
    expected, momentum = torch.zeros(2, dtype=torch.float64), 1 - (1 - MOMENTUM) ** (1 / 4)
    for part in model.samples.split(2):
        expected = (1 - momentum) * expected + momentum * part.mean(0)
    assert torch.allclose(model.net[0].running_mean, expected, rtol=0, atol=1e-12)
    assert model.net[0].momentum == MOMENTUM
