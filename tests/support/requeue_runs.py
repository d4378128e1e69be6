"""Fits that are told to stop, in a SLURM that notes what it is asked for and answers what a test wants."""

import atexit
import multiprocessing
import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers.logger import Logger
from support.helpers import PlantedError
from support.ports import find_free_port
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_vram.callbacks.slurm_requeue import callback as slurm_requeue
from lightning_vram.callbacks.slurm_requeue.callback import JobStopped, SlurmRequeue
from lightning_vram.core import processes

JOB_ID = "17"
BATCH_SIZE = 2
NUM_VAL_BATCHES = 2
TASK = {
    **{"SLURM_JOB_ID": JOB_ID, "SLURM_JOB_NAME": "train", "SLURM_NODELIST": "localhost"},
    **dict.fromkeys(("SLURM_NTASKS", "SLURM_NTASKS_PER_NODE", "SLURM_NNODES"), "1"),
    **dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_ID"), "0"),
}


class FakeSlurm:
    """A job of one task, and an ``scontrol`` on the path."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder = folder / "scontrol_bin"
        self._monkeypatch = monkeypatch
        self._folder.mkdir()
        self.leave()
        for name, value in TASK.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("PATH", f"{self._folder}{os.pathsep}{os.environ['PATH']}")
        self.answer()
        self.start(0)

    def answer(self, output: str = "JobState=RUNNING", error: str = "", code: int = 0) -> None:
        """Let scontrol say it from now on."""
        script = self._folder / "scontrol"
        script.write_text(f'#!/bin/sh\necho "$@" >> {self._folder}/asked\necho {output}\n')
        with script.open("a") as file:
            file.write(f"echo '{error}' >&2\nexit {code}\n")
        script.chmod(0o755)

    def take_away(self) -> None:
        self._monkeypatch.setenv("PATH", str(self._folder))
        (self._folder / "scontrol").unlink()

    def leave(self) -> None:
        """Be outside of any job."""
        for name in [name for name in os.environ if name.startswith("SLURM")]:
            self._monkeypatch.delenv(name)

    @property
    def asked(self) -> list[str]:
        """Arguments of all calls since the last start."""
        path = self._folder / "asked"
        return path.read_text().splitlines() if path.exists() else []

    def start(self, restart_count: int) -> None:
        """Start the job, for the first time or again, in a process that handles no signals."""
        processes._arrived.clear()
        processes._handlers_before.clear()
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        self._monkeypatch.setenv("SLURM_RESTART_COUNT", str(restart_count))
        self._monkeypatch.setenv("MASTER_PORT", str(find_free_port()))  # that of the job's number may be another test's
        (self._folder / "asked").unlink(missing_ok=True)


class Noting(pl.LightningModule):
    """Draws random numbers wherever one may, and notes all that it sees."""

    def __init__(self, num_batches: int = 3, num_workers: int = 0, has_generator: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 1))
        self.num_batches, self.num_workers, self.has_generator = num_batches, num_workers, has_generator
        self.seen: list[object] = []
        self.val_losses: list[float] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen.append((self.current_epoch, batch_idx, batch[0][:, 0].tolist()))
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.net(batch[0] + torch.rand(1)).mean(), sync_dist=True)

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.net(batch[0])

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.net(batch[0])

    def on_validation_epoch_end(self) -> None:
        self.val_losses.append(float(self.trainer.callback_metrics["val_loss"]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.1)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9), "interval": "step"}]

    def make_loader(self, num_batches: int, **arguments: Any) -> DataLoader:
        samples = torch.randn(num_batches * BATCH_SIZE, 4, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(samples), batch_size=BATCH_SIZE, **arguments)

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(2) if self.has_generator else None
        return self.make_loader(self.num_batches, shuffle=True, num_workers=self.num_workers, generator=generator)

    def val_dataloader(self) -> DataLoader:
        return self.make_loader(NUM_VAL_BATCHES)

    test_dataloader = val_dataloader
    predict_dataloader = val_dataloader


class Rows(Logger):
    name, version = "rows", 0

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[object] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Send(pl.Callback):
    """Sends a signal when the batch with a number begins, training and validation counted together.

    To this process, and with ``to_all`` to its children, as SLURM does.
    """

    def __init__(self, at: int | None, number: int = signal.SIGUSR1, *, to_all: bool = False) -> None:
        self.at, self.number, self.to_all = at, number, to_all
        self.num_batches = 0
        self.outlived: list[bool] = []

    def on_train_batch_start(self, *args: Any) -> None:
        if self.num_batches == self.at:
            if self.to_all:  # by another process: workers take what their parent sends for their orderly end
                workers = multiprocessing.active_children()
                subprocess.run(["kill", f"-{int(self.number)}", *(str(worker.pid) for worker in workers)], check=True)
                for worker in workers:
                    worker.join(0.2)  # time to die
                self.outlived = [worker.is_alive() for worker in workers]
            os.kill(os.getpid(), self.number)
        self.num_batches += 1

    def _evaluate(self, trainer: pl.Trainer, *args: Any) -> None:
        if not trainer.sanity_checking:
            self.on_train_batch_start()

    on_validation_batch_start = on_test_batch_start = on_predict_batch_start = _evaluate


@dataclass
class Run:
    """What became of a fit. ``code`` is that of ``JobStopped``, or ``None``."""

    module: Noting
    trainer: pl.Trainer
    rows: list[object] = field(default_factory=list)
    code: object = None


class Fail(pl.Callback):
    """Raises when the training batch with a number begins; ``run`` is what came of the fit."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.run: Run | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, *args: Any) -> None:
        if len(pl_module.seen) == self.at:
            self.run = Run(pl_module, trainer, getattr(trainer.logger, "rows", []))
            raise PlantedError


def make_trainer(folder: Path, *callbacks: pl.Callback, **arguments: Any) -> pl.Trainer:
    defaults = {
        **{"accelerator": "cpu", "devices": 1, "default_root_dir": folder, "logger": Rows()},
        **{"max_epochs": 2, "num_sanity_val_steps": 0, "log_every_n_steps": 1},
        **dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False),
    }
    return pl.Trainer(**(defaults | arguments), callbacks=list(callbacks))


def fit(
    make: Callable[[], Noting],
    folder: Path,
    *callbacks: pl.Callback,
    ckpt_path: Any = None,
    ends_process: bool = True,
    **arguments: Any,
) -> Run:
    """Fit, in a process that may end afterwards. A fit that resumes has another seed: all is in the checkpoint."""
    slurm_requeue._folders.clear()
    is_resumed = ckpt_path is not None or os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    pl.seed_everything(99 if is_resumed else 3, verbose=False)
    os.environ["PL_GLOBAL_SEED"] = "3"  # which samplers of several ranks go by
    module = make()
    trainer = make_trainer(folder, *callbacks, **arguments)
    run = Run(module, trainer, getattr(trainer.logger, "rows", []))
    try:
        trainer.fit(module, ckpt_path=ckpt_path)
        if ends_process:
            remove_folders()
    except JobStopped as stopped:
        run.code = stopped.code
    finally:
        atexit.unregister(slurm_requeue._end_program)
        if ends_process or run.code is not None:
            end_process(*callbacks)
        trainer.fit_loop.teardown()  # Lightning forgets it if a validation fails: workers of the loader would stay
    return run


def remove_folders() -> None:
    """Do what a process does at its end."""
    for folder in slurm_requeue._folders:
        folder.remove()


def end_process(*callbacks: pl.Callback) -> None:
    """Leave no more of SlurmRequeue than the end of a process would."""
    slurm_requeue._folders.clear()
    for callback in callbacks:
        if isinstance(callback, SlurmRequeue):
            callback._release()
            callback._signals.remove()
    processes._arrived.clear()


def assert_went_on(expected: Run, *parts: Run) -> None:
    """Weights, samples, validation losses and what was logged are those of a run without a break, to the bit."""
    assert [batch for part in parts for batch in part.module.seen] == expected.module.seen
    assert [loss for part in parts for loss in part.module.val_losses] == expected.module.val_losses
    assert [row for part in parts for row in part.rows] == expected.rows
    weights = parts[-1].module.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.module.state_dict().items())
