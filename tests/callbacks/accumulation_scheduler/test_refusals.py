"""AccumulationScheduler: what it does not take, and how it says so."""

import re
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.accumulation_models import Scalar
from torch.utils.data import DataLoader, IterableDataset

from lightning_vram.callbacks.accumulation_scheduler.callback import AccumulationScheduler

CONFIG = Path(__file__).parents[3] / "configs" / "accumulation_scheduler.yaml"
NAME = "AccumulationScheduler"


ONE_OF = "needs exactly one of by_epoch, by_step and target_batch_size, got"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({}, ValueError, f" {ONE_OF} none."),
        ({"by_epoch": {0: 2}, "by_step": {0: 2}}, ValueError, f" {ONE_OF} by_epoch and by_step."),
        ({"by_epoch": 4}, TypeError, "(by_epoch) must be a dict such as {0: 8, 4: 4}, got 4 of type int."),
        ({"by_epoch": {}}, ValueError, "(by_epoch) must not be empty. {0: 8} accumulates 8 micro-batches throughout."),
        ({"by_epoch": {True: 2}}, TypeError, "(by_epoch) must have epochs as keys, got True of type bool."),
        ({"by_step": {-1: 2}}, ValueError, "(by_step) must have steps from 0 on as keys, got -1."),
        ({"by_epoch": {0: True}}, TypeError, "(by_epoch)[0] must be an int, got True of type bool."),
        ({"by_epoch": {3: 0}}, ValueError, "(by_epoch)[3] must be at least 1, got 0."),
        (
            {"by_epoch": {4: 2, 0: 8}},
            ValueError,
            "(by_epoch) must be in ascending order, got {4: 2, 0: 8}: {0: 8, 4: 2}.",
        ),
        ({"target_batch_size": 0}, ValueError, "(target_batch_size) must be at least 1, got 0."),
        ({"target_batch_size": 8, "round": "x"}, ValueError, "(round) must be 'up', 'down' or None, got 'x'."),
        ({"by_epoch": {0: 2}, "round": "up"}, ValueError, "(round) needs target_batch_size, got round='up' alone."),
        (
            {"by_epoch": {0: 2}, "weight": "words"},
            ValueError,
            "(weight) must be a function or one of samples, tokens, shifted_tokens, got 'words'.",
        ),
        (
            {"by_epoch": {0: 2}, "correct_batch_norm": 1},
            TypeError,
            "(correct_batch_norm) must be True or False, got 1 of type int.",
        ),
    ],
)
def test_refuses(arguments, error, message):
    with pytest.raises(error, match=f"^{re.escape(NAME + message)}$"):
        AccumulationScheduler(**arguments)


class Manual(Scalar):
    automatic_optimization = False


class TakesIterator(Scalar):
    def training_step(self, dataloader_iter):
        raise AssertionError


class WithLBFGS(Scalar):
    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.parametrize(
    ("model", "callbacks", "arguments", "message"),
    [
        (
            Manual,
            [],
            {},
            "manual optimization: training_step calls the optimizer itself. Accumulate there, or set "
            "automatic_optimization=True.",
        ),
        (
            TakesIterator,
            [],
            {},
            "training_step(dataloader_iter): the step fetches its batches itself. Use training_step(self, batch, "
            "batch_idx).",
        ),
        (
            Scalar,
            [],
            {"accumulate_grad_batches": 2},
            "Trainer(accumulate_grad_batches=2): both set the accumulation factor. Remove that argument.",
        ),
        (
            Scalar,
            [GradientAccumulationScheduler({0: 2})],
            {},
            "GradientAccumulationScheduler: both set the accumulation factor. Remove the latter; "
            "AccumulationScheduler(by_epoch=...) takes its dict.",
        ),
        (
            WithLBFGS,
            [],
            {},
            "LBFGS: it evaluates the loss several times per step, each time with the last micro-batch only. Use larger "
            "batches or another optimizer.",
        ),
    ],
    ids=["manual", "iterator", "argument", "callback", "LBFGS"],
)
def test_a_run_that_cannot_accumulate_is_refused_before_its_first_batch(fit, model, callbacks, arguments, message):
    module = model(range(4))
    with pytest.raises(MisconfigurationException, match=f"^{NAME} does not work with {re.escape(message)}$"):
        fit(lambda: module, AccumulationScheduler({0: 2}), *callbacks, **arguments)
    assert module.gradients == []


def test_two_of_them_are_refused(fit):
    class Other(AccumulationScheduler):
        state_key = "other"  # Lightning refuses two of one key itself

    message = f"^{NAME} can be used once, got several. Merge them into one schedule.$"
    with pytest.raises(MisconfigurationException, match=message):
        fit(lambda: Scalar(range(4)), AccumulationScheduler({0: 2}), Other({0: 4}))


def test_strategies_that_accumulate_otherwise_are_refused(make_trainer, monkeypatch):
    callback = AccumulationScheduler({0: 2})
    trainer, model = make_trainer(callbacks=[callback]), Scalar(range(4))
    trainer.strategy.connect(model)
    monkeypatch.setattr(type(trainer.strategy), "handles_gradient_accumulation", True)
    with pytest.raises(MisconfigurationException) as caught:
        callback._apply(trainer)
    assert str(caught.value) == (
        f"{NAME} does not work with SingleDeviceStrategy: it accumulates gradients itself, with one factor "
        f"for the whole run. Use its own configuration and remove the callback."
    )
    strategy = FSDPStrategy(cpu_offload=True)
    strategy.connect(model)
    monkeypatch.setattr(type(trainer), "strategy", strategy)
    with pytest.raises(MisconfigurationException) as caught:
        callback._apply(trainer)
    assert str(caught.value) == (
        f"{NAME} does not work with FSDPStrategy(cpu_offload=True): FSDP1 accumulates wrong gradients. "
        "Use FSDP2: ModelParallelStrategy."
    )


class WithTwoLoaders(Scalar):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch[0], batch_idx)

    def train_dataloader(self):
        return [DataLoader(self.values, batch_size=2)] * 2


class Batches(IterableDataset):
    def __iter__(self):
        yield torch.ones(2, dtype=torch.float64)


class WithBatches(Scalar):
    def train_dataloader(self):
        return DataLoader(Batches(), batch_size=None)


OF_RANKS = "one micro-batch of all ranks is 2 x 1 = 2 samples."
INSTEAD = "Give by_epoch={0: number of micro-batches} instead."


@pytest.mark.parametrize(
    ("model", "target", "message"),
    [
        (Scalar, 7, f"must be a multiple of 2, got 7: {OF_RANKS} Choose 6 or 8, or round='down' or 'up'."),
        (
            Scalar,
            1,
            f"must be at least 2, got 1: {OF_RANKS} Choose a smaller batch size for the loader, or round='up'.",
        ),
        (WithTwoLoaders, 4, f"needs one training dataloader, got 2. {INSTEAD}"),
        (WithBatches, 4, f"needs a training dataloader with a batch_size, got a DataLoader without. {INSTEAD}"),
    ],
)
def test_a_target_that_cannot_be_met_is_refused_before_the_first_batch(fit, model, target, message):
    module = model(range(8), batch_size=2)
    message = re.escape(f"{NAME}(target_batch_size) {message}")
    with pytest.raises(MisconfigurationException, match=f"^{message}$"):
        fit(lambda: module, AccumulationScheduler(target_batch_size=target))
    assert module.gradients == []


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore:LightningCLI's args parameter", "ignore:No seed found"
)
@pytest.mark.parametrize("text", ["{0: 2, 9: 3}", '{"0": 2, "9": 3}'])
def test_keys_are_numbers_however_they_are_written_on_the_command_line(text):
    args = [f"--config={CONFIG}", "--model.values=[1]", "--trainer.callbacks.init_args.by_epoch", text]
    cli = LightningCLI(Scalar, args=[*args, "--trainer.logger=false"], run=False, save_config_callback=None)
    (callback,) = (c for c in cli.trainer.callbacks if isinstance(c, AccumulationScheduler))
    assert (callback._schedule.starts, callback._schedule.factors) == ((0, 9), (2, 3))
