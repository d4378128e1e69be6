"""AccumulationScheduler: a run that goes on from a checkpoint is the run that never stopped."""

import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback, OnExceptionCheckpoint
from support.accumulation_models import Scalar, Streaming
from support.helpers import PlantedError

from lightning_vram.callbacks.accumulation_scheduler.callback import AccumulationScheduler

pytestmark = pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended")


class Loader:
    """One value after the other; the first time not from the start.

    Lightning restores no loader that ``estimated_stepping_batches`` has set up before.
    """

    def __init__(self, values, start):
        self.values = values
        self.start = start

    def __len__(self):
        return len(self.values)

    def __iter__(self):
        start = self.start
        for value in self.values[start:]:
            self.start = 0  # Lightning makes iterators that it does not use
            yield value[None]


class Training(Scalar):
    def __init__(self, values, start=0):
        super().__init__(values)
        self.start = start
        self.learning_rates = []

    def train_dataloader(self):
        return Loader(self.values, self.start)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        total_steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total_steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer):
        super().on_before_optimizer_step(optimizer)
        self.learning_rates.append(optimizer.param_groups[0]["lr"])


class SaveAfter(Callback):
    def __init__(self, num_batches, path):
        self.num_batches = num_batches
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx + 1 == self.num_batches:
            trainer.save_checkpoint(self.path)


SCHEDULES = {"by_epoch": {0: 3, 1: 2}, "by_step": {0: 2, 2: 4, 4: 3}}
VALUES = range(1, 8)


@pytest.mark.parametrize("unit", SCHEDULES)
@pytest.mark.parametrize("num_batches", [1, 4, 7, 9])
def test_a_resumed_run_is_the_one_that_never_stopped(make_trainer, tmp_path, unit, num_batches):
    """Between windows to the bit; within one, what it held is lost and its mean is over what is still to come."""

    def fit(*callbacks, start=0, ckpt_path=None):
        model = Training(VALUES, start)
        schedule = AccumulationScheduler(**{unit: SCHEDULES[unit]})
        make_trainer(callbacks=[schedule, *callbacks], limit_val_batches=0).fit(model, ckpt_path=ckpt_path)
        return model

    path = tmp_path / "checkpoint.ckpt"
    whole = fit(SaveAfter(num_batches, path))
    position = num_batches % len(VALUES)
    resumed = fit(start=position, ckpt_path=path)
    steps = torch.load(path)["global_step"]
    assert resumed.learning_rates == whole.learning_rates[steps:]
    lost = torch.load(path)["callbacks"]["AccumulationScheduler"]
    if lost["num_done"] == lost["length"]:
        assert resumed.gradients == whole.gradients[steps:]
        assert torch.equal(resumed.weight, whole.weight)
        return
    first, *others = resumed.gradients
    num_left = lost["length"] - lost["num_done"]
    assert first == pytest.approx(sum(VALUES[position : position + num_left]) / num_left, abs=1e-12)
    assert others == whole.gradients[steps + 1 :]


def test_gradients_of_an_earlier_fit_are_not_in_a_resumed_window(make_trainer, tmp_path):
    path = tmp_path / "checkpoint.ckpt"
    model = Training(range(1, 5))
    callbacks = [AccumulationScheduler({0: 4}), SaveAfter(2, path)]
    make_trainer(callbacks=callbacks, limit_val_batches=0, max_epochs=1).fit(model)
    model.weight.grad.fill_(1000)
    model.start = 2
    make_trainer(callbacks=[AccumulationScheduler({0: 4})], limit_val_batches=0, max_epochs=1).fit(
        model, ckpt_path=path
    )
    assert model.gradients == [2.5, 3.5]
    assert model.zeroed_at == [0, 2]


@pytest.mark.filterwarnings("ignore:`.fit.ckpt_path=None.` was called without a model", "ignore:.fit.ckpt_path=")
def test_a_checkpoint_of_an_error_counts_the_batch_that_failed_once(make_trainer, tmp_path):
    class Failing(Training):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2 and self.fails:
                raise PlantedError
            return super().training_step(batch, batch_idx)

    def fit(model):
        callbacks = [OnExceptionCheckpoint(tmp_path), AccumulationScheduler({0: 4})]
        make_trainer(callbacks=callbacks, limit_val_batches=0, enable_checkpointing=True).fit(model)

    model = Failing(range(1, 9))
    model.fails = True
    with pytest.raises(PlantedError):
        fit(model)
    state = torch.load(tmp_path / "on_exception.ckpt")["callbacks"]["AccumulationScheduler"]
    assert (state["num_done"], state["length"]) == (2, 4)


def test_a_checkpoint_in_the_middle_of_a_batch_does_not_count_it(make_trainer, tmp_path):
    class SaveWithin(Callback):
        def on_before_backward(self, trainer, pl_module, loss):
            if trainer.fit_loop.batch_idx == 5:
                trainer.save_checkpoint(tmp_path / "checkpoint.ckpt")

    def fit(*callbacks, start=0, **arguments):
        model = Training(range(1, 9), start)
        callbacks = [AccumulationScheduler({0: 4}), *callbacks]
        make_trainer(callbacks=callbacks, limit_val_batches=0, max_epochs=1).fit(model, **arguments)
        return model.gradients

    assert fit(SaveWithin()) == [2.5, 6.5]
    assert fit(start=5, ckpt_path=tmp_path / "checkpoint.ckpt") == [7]


def test_the_window_that_the_end_of_a_stream_closed_is_not_gone_on_with(make_trainer, tmp_path):
    """Lightning begins the next epoch of a checkpoint of its last batch in the middle of nowhere."""

    def save(trainer, *args):
        if trainer.fit_loop.total_batch_idx + 1 == 7:
            trainer.save_checkpoint(tmp_path / "checkpoint.ckpt")

    saving = LambdaCallback(on_train_batch_end=save)
    whole, resumed = Streaming(range(1, 8)), Streaming(range(1, 8))
    arguments = {"limit_val_batches": 0, "max_epochs": 3}
    make_trainer(callbacks=[AccumulationScheduler({0: 4}), saving], **arguments).fit(whole)
    assert whole.gradients == [2.5, 6] * 3
    make_trainer(callbacks=[AccumulationScheduler({0: 4})], **arguments).fit(
        resumed, ckpt_path=tmp_path / "checkpoint.ckpt"
    )
    assert resumed.gradients == [2.5, 6] * 2
