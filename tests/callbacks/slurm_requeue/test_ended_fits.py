"""What a program has trained is not trained again when SLURM stops it later: in a test, or in another fit."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from support.helpers import PlantedError
from support.requeue_runs import Noting, Run, Send, end_process, fit, remove_folders
from torch import Tensor

from lightning_vram import FSDPOffloadStrategy
from lightning_vram.callbacks.slurm_requeue import callback as slurm_requeue
from lightning_vram.callbacks.slurm_requeue.callback import JobStopped, SlurmRequeue

pytestmark = [
    pytest.mark.filterwarnings("ignore:It is recommended to use `self.log.*sync_dist"),
    pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]


class StopAt(pl.Callback):
    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.global_step == 2


class Program:
    """Fits, draws a number, and tests; a signal comes with batch ``at`` of the fit and the test together."""

    def __init__(self, folder: Path, *callbacks: pl.Callback, at: int | None = None, **arguments: Any) -> None:
        self.send = Send(at)
        self.callback = SlurmRequeue()
        self.fit = fit(Noting, folder, *callbacks, self.send, self.callback, ends_process=False, **arguments)
        trainer, module = self.fit.trainer, self.fit.module
        self.num_fit_batches = self.send.num_batches
        self.weights = {name: tensor.clone() for name, tensor in module.state_dict().items()}
        self.progress = (trainer.current_epoch, trainer.global_step)
        self.drawn = torch.rand(3).tolist()
        self.code: object = None
        try:
            trainer.test(module)
            remove_folders()
        except JobStopped as stopped:
            self.code = stopped.code
        end_process(self.callback)

    def assert_as(self, other: "Program") -> None:
        """Whatever comes after the fit finds the same."""
        assert self.progress == other.progress
        assert self.drawn == other.drawn
        assert all(torch.equal(self.weights[name], tensor) for name, tensor in other.weights.items())


CASES: dict[str, Any] = {
    "epochs": lambda: ([], {}),
    "stopped in the middle of an epoch": lambda: ([StopAt()], {}),
    "weights that are averaged at the end": lambda: ([StochasticWeightAveraging(0.1, 0.5)], {"max_epochs": 3}),
    "sharded": lambda: ([], {"strategy": FSDPOffloadStrategy(state_dict_type="sharded")}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_program_that_is_stopped_in_its_test_does_not_train_again(case, slurm, tmp_path):
    def run(at: int | None = None) -> Program:
        callbacks, arguments = CASES[case]()
        return Program(tmp_path, *callbacks, at=at, **arguments)

    expected = run()
    assert expected.code is None
    assert not (tmp_path / "slurm_requeue").exists()
    stopped = run(at=expected.num_fit_batches)
    assert stopped.code == 0
    stopped.assert_as(expected)
    for restart in (1, 2):
        slurm.start(restart)
        again = run(at=0 if restart == 1 else None)  # stopped in the test once more
        assert again.fit.module.seen == []
        assert again.code == (0 if restart == 1 else None)
        again.assert_as(expected)
    assert not (tmp_path / "slurm_requeue").exists()


def test_the_end_goes_before_a_checkpoint_of_the_fit(slurm, tmp_path, monkeypatch):
    checkpoints = ModelCheckpoint(tmp_path / "checkpoints", every_n_train_steps=1, save_last=True, save_top_k=0)
    expected = Program(tmp_path, checkpoints, enable_checkpointing=True)
    Program(tmp_path, checkpoints, at=expected.num_fit_batches, enable_checkpointing=True)
    slurm.start(1)
    said: list[str] = []
    monkeypatch.setattr(slurm_requeue, "rank_zero_info", said.append)
    again = Program(tmp_path, checkpoints, enable_checkpointing=True)
    assert again.fit.module.seen == []
    again.assert_as(expected)
    assert said == ["SlurmRequeue: this fit had ended before the restart."]


def test_a_fit_that_is_given_more_to_do_goes_on_from_its_end(slurm, tmp_path):
    expected = fit(Noting, tmp_path / "expected", SlurmRequeue(), max_epochs=4)
    fit(Noting, tmp_path, SlurmRequeue(), ends_process=False)
    slurm.start(1)
    stopped = fit(Noting, tmp_path, Send(1), SlurmRequeue(), max_epochs=4, min_epochs=4)
    assert (stopped.code, stopped.module.seen) == (0, expected.module.seen[6:8])
    slurm.start(2)
    again = fit(Noting, tmp_path, SlurmRequeue(), max_epochs=4, min_epochs=4)
    assert again.module.seen == expected.module.seen[8:]


class Registry:
    def __init__(self) -> None:
        self.functions: set[Any] = set()
        self.register, self.unregister = self.functions.add, self.functions.discard


@pytest.mark.parametrize("error", [PlantedError, JobStopped])
def test_a_program_that_fails_or_is_stopped_after_the_fit_keeps_it(error, slurm, tmp_path, monkeypatch):
    class Failing(Noting):
        def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
            if error is PlantedError:
                raise PlantedError
            os.kill(os.getpid(), signal.SIGUSR1)

    registry = Registry()
    monkeypatch.setattr(slurm_requeue, "atexit", registry)
    run: Run = fit(Failing, tmp_path, SlurmRequeue(), ends_process=False)
    assert slurm_requeue._end_program in registry.functions
    with pytest.raises(error):
        run.trainer.test(run.module)
    assert slurm_requeue._end_program not in registry.functions
    end_process(*run.trainer.callbacks)


@pytest.mark.parametrize("error", [None, ValueError])
def test_a_program_that_an_error_has_ended_keeps_it(error, slurm, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "last_type", error, raising=False)  # Python's own note of it
    callback = SlurmRequeue()
    fit(Noting, tmp_path, callback, ends_process=False)
    slurm_requeue._end_program()
    assert (tmp_path / "slurm_requeue").exists() == (error is not None)
    end_process(callback)
