"""A fit with one of Lightning's tuners is stopped, and goes on with what the tuner has found."""

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from support.requeue_runs import FakeSlurm, Noting, Run, Send, assert_went_on, fit
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_vram import FSDPOffloadStrategy
from lightning_vram.callbacks.slurm_requeue import exact_resume
from lightning_vram.callbacks.slurm_requeue.callback import SlurmRequeue
from lightning_vram.core.patching import MethodPatch

pytestmark = pytest.mark.filterwarnings("ignore:The number of training batches")

TUNERS = ["learning rate", "batch size"]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return FakeSlurm(tmp_path, monkeypatch)


class Tuned(Noting):
    """Notes what it sees outside of trials; there it only counts, and may be signalled."""

    def __init__(self, signal_in_trial: int = -1) -> None:
        super().__init__(num_batches=8)
        self.lr = 0.1
        self.batch_size = 1
        self.signal_in_trial = signal_in_trial
        self.num_trial_steps = 0

    def is_trial(self) -> bool:
        return not any(isinstance(callback, Send) for callback in self.trainer.callbacks)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.is_trial():
            self.seen.pop()
            if self.num_trial_steps == self.signal_in_trial:
                os.kill(os.getpid(), signal.SIGUSR1)
            self.num_trial_steps += 1
        return loss

    def on_validation_epoch_end(self) -> None:
        if not self.is_trial():
            super().on_validation_epoch_end()

    def configure_optimizers(self) -> Any:
        optimizers, schedulers = super().configure_optimizers()
        optimizers[0].param_groups[0]["lr"] = optimizers[0].param_groups[0]["initial_lr"] = self.lr
        schedulers[0]["scheduler"].base_lrs = [self.lr]
        return optimizers, schedulers

    def train_dataloader(self) -> DataLoader:
        return DataLoader(super().train_dataloader().dataset, batch_size=self.batch_size, shuffle=True)


class AtEpochs(LearningRateFinder):
    """Searches when epochs begin, as Lightning's documentation shows. After the first epoch its searches are empty."""

    def on_fit_start(self, *args: Any) -> None:
        """Not yet."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.lr_find(trainer, pl_module)


def make_tuner(kind: str) -> Any:
    if kind == "batch size":
        return BatchSizeFinder(max_trials=2, steps_per_trial=1, init_val=1)
    return (LearningRateFinder if kind == "learning rate" else AtEpochs)(min_lr=1e-3, num_training_steps=30)


def tune(kind: str, folder: Path, *callbacks: Any, at: int | None = None, signal_in_trial: int = -1) -> Run:
    max_epochs = 2 if kind in TUNERS else 4  # trials at an epoch count as epochs
    make = partial(Tuned, signal_in_trial)
    return fit(make, folder, make_tuner(kind), Send(at), *callbacks, max_epochs=max_epochs)


@pytest.mark.parametrize("kind", [*TUNERS, "learning rate at epochs"])
def test_its_trials_do_not_change_the_fit(kind, slurm, tmp_path):
    alone, ours = tune(kind, tmp_path), tune(kind, tmp_path, SlurmRequeue())
    assert_went_on(alone, ours)
    assert ours.module.num_trial_steps == alone.module.num_trial_steps > 0


@pytest.mark.parametrize("at", [0, 3, 7, 12])
@pytest.mark.parametrize("kind", TUNERS)
def test_a_fit_that_goes_on_does_not_search_again(kind, at, slurm, tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(exact_resume, "rank_zero_info", said.append)
    expected = tune(kind, tmp_path, SlurmRequeue())
    found = (expected.module.lr, expected.module.batch_size)
    assert found != (0.1, 1)
    stopped = tune(kind, tmp_path, SlurmRequeue(), at=at)
    assert stopped.code == 0
    slurm.start(1)
    again = tune(kind, tmp_path, SlurmRequeue())
    assert (again.module.lr, again.module.batch_size) == found
    assert again.module.num_trial_steps == 0
    value = f"lr={found[0]}" if kind == "learning rate" else f"batch_size={found[1]}"
    assert [line.partition(": ")[2] for line in said] == [f"this fit is resumed, with {value}."]
    assert_went_on(expected, stopped, again)


@pytest.mark.parametrize("kind", TUNERS)
def test_trials_are_not_stopped_in(kind, slurm, tmp_path):
    expected = tune(kind, tmp_path, SlurmRequeue())
    stopped = tune(kind, tmp_path, SlurmRequeue(), signal_in_trial=1)
    assert stopped.code == 0
    assert stopped.module.num_trial_steps == expected.module.num_trial_steps
    assert len(stopped.module.seen) <= 2
    slurm.start(1)
    assert_went_on(expected, stopped, tune(kind, tmp_path, SlurmRequeue()))


def test_searches_that_are_due_later_are_made(slurm, tmp_path):
    kind = "learning rate at epochs"
    expected = tune(kind, tmp_path, SlurmRequeue())
    stopped = tune(kind, tmp_path, SlurmRequeue(), at=2)
    assert stopped.code == 0
    (checkpoint,) = tmp_path.glob("slurm_requeue/*/*/fit-1.ckpt")
    os.utime(checkpoint, (time.time() + 100,) * 2)  # on a file system whose clock is ahead
    slurm.start(1)
    again = tune(kind, tmp_path, SlurmRequeue())
    assert_went_on(expected, stopped, again)
    (tuner,) = (callback for callback in again.trainer.callbacks if isinstance(callback, AtEpochs))
    assert tuner.optimal_lr is not None


@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log.*sync_dist")  # a strategy of several ranks
def test_a_strategy_that_loads_after_the_search_goes_on_too(slurm, tmp_path):
    def run(at: int | None = None) -> Run:
        return fit(
            Tuned, tmp_path, make_tuner("learning rate"), Send(at), SlurmRequeue(), strategy=FSDPOffloadStrategy()
        )

    expected, stopped = run(), run(at=3)
    assert stopped.code == 0
    slurm.start(1)
    assert_went_on(expected, stopped, run())


@pytest.mark.parametrize("kind", TUNERS)
def test_without_the_tuner_arguments_are_those_that_are_given(kind, slurm, tmp_path):
    tune(kind, tmp_path, SlurmRequeue(), at=3)
    slurm.start(1)
    again = fit(Tuned, tmp_path, Send(None), SlurmRequeue())
    assert (again.module.lr, again.module.batch_size) == (0.1, 1)


@pytest.mark.parametrize("kind", TUNERS)
def test_nothing_is_left_on_the_tuner(kind, slurm, tmp_path):
    tuner = make_tuner(kind)
    fit(Tuned, tmp_path, tuner, Send(at=3), SlurmRequeue())
    slurm.start(1)
    run = fit(Tuned, tmp_path, tuner, Send(at=None), SlurmRequeue())
    assert not any(isinstance(value, MethodPatch) for value in vars(tuner).values())
    assert "restore" not in vars(run.trainer._checkpoint_connector)
    assert torch.isfinite(next(run.module.parameters())).all()
