"""AccumulationScheduler: what others see of the trainer before, beside and after the training."""

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from support.accumulation_models import Scalar
from torch.utils.data import DataLoader

from lightning_vram.callbacks.accumulation_scheduler.callback import AccumulationScheduler

SCHEDULES = [{"by_epoch": {0: 4}}, {"by_step": {0: 4}}, {"target_batch_size": 4}]


class Asking(Scalar):
    def setup(self, stage):
        self.estimates = [self.trainer.estimated_stepping_batches]
        self.factors = [self.trainer.accumulate_grad_batches]

    def ask(self):
        self.estimates.append(self.trainer.estimated_stepping_batches)
        self.factors.append(self.trainer.accumulate_grad_batches)

    configure_model = on_fit_start = on_train_start = ask

    def configure_optimizers(self):
        self.ask()
        return super().configure_optimizers()


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: next(iter(schedule)))
def test_the_number_of_steps_and_the_first_factor_are_known_from_setup_on(make_trainer, schedule):
    model = Asking(range(16))
    trainer = make_trainer(callbacks=[AccumulationScheduler(**schedule)], limit_val_batches=0, max_epochs=1)
    trainer.fit(model)
    assert model.estimates == [4] * 5
    assert model.factors == [4] * 5
    assert trainer.accumulate_grad_batches == 1


class Tuned(Scalar):
    def __init__(self, values, batch_size=1):
        super().__init__(values, batch_size)
        self.lr = 0.01
        self.events = ""

    def training_step(self, batch, batch_idx):
        self.events += "m"
        return (self.weight - batch).square().mean()

    def on_before_optimizer_step(self, optimizer):
        self.events += "S"

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@pytest.mark.filterwarnings("ignore:.*suggestion", "ignore:.*not enough points")
@pytest.mark.parametrize(("schedule", "is_first"), [({"by_step": {0: 4}}, True), ({"target_batch_size": 4}, False)])
def test_a_search_for_a_learning_rate_accumulates(make_trainer, schedule, is_first):
    ours, finder = AccumulationScheduler(**schedule), LearningRateFinder(num_training_steps=5)
    model = Tuned(torch.linspace(0, 1, 80))
    callbacks = [ours, finder] if is_first else [finder, ours]
    trainer = make_trainer(callbacks=callbacks, max_steps=2, max_epochs=-1)
    trainer.fit(model)
    assert model.events == "mmmmS" * (finder.optimal_lr._total_batch_idx + 1 + 8 >> 2)
    assert trainer.global_step == 2
    assert len(finder.optimal_lr.results["lr"]) == len(finder.optimal_lr.results["loss"]) > 0


def test_batch_sizes_that_are_tried_need_not_divide_the_target(make_trainer):
    callbacks = [
        AccumulationScheduler(target_batch_size=12, round="up"),
        BatchSizeFinder(steps_per_trial=1, max_trials=2),
    ]
    model = Tuned(torch.linspace(0, 1, 48), batch_size=5)
    model.train_dataloader = lambda: DataLoader(model.values, batch_size=model.batch_size)
    trainer = make_trainer(callbacks=callbacks, max_epochs=1)
    trainer.fit(model)
    assert model.batch_size == 4
    assert model.events[-16:] == "mmmS" * 4
    assert trainer.global_step == 4


def test_a_test_of_a_checkpoint_does_not_move_the_window(make_trainer, tmp_path):
    class Saving(Scalar):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            if batch_idx == 4:
                self.trainer.save_checkpoint(tmp_path / "middle.ckpt")

        def test_step(self, batch, batch_idx):
            pass

        def test_dataloader(self):
            return DataLoader(self.values)

    callback, model = AccumulationScheduler({0: 4}), Saving(range(8))
    trainer = make_trainer(callbacks=[callback], limit_val_batches=0, max_epochs=1)
    trainer.fit(model)
    trainer.test(model, ckpt_path=tmp_path / "middle.ckpt", verbose=False)
    assert callback.state_dict() == {"length": 4, "num_done": 4, "batch": 8}
