"""Whole runs of a Trainer: a workload as a LightningModule, and callbacks that measure its steps."""

import contextlib
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_vram.core.processes import leave_group
from lightning_vram.memory.tracking.timeline import Phase
from lightning_vram.memory.tracking.tracker import MemoryTracker, track_memory
from tests.benchmarks.cases import Workload
from tests.benchmarks.measure import (
    NUM_WARM_UP,
    Clock,
    Now,
    Row,
    accelerator_of,
    describe_timeline,
    give_back,
    read_peaks,
    synchronize,
)
from tests.benchmarks.ways import PLAIN, Way


class Same(Dataset):
    """One batch, again and again."""

    def __init__(self, batch: Any, num_batches: int) -> None:
        self.batch = batch
        self.num_batches = num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> Any:
        return self.batch


class LitWorkload(pl.LightningModule):
    """A workload, changed as a way has it."""

    def __init__(self, workload: Workload, num_batches: int, way: Way = PLAIN) -> None:
        super().__init__()
        self.workload, self.num_batches, self.way = workload, num_batches, way
        self.net: nn.Module = workload.make_model()
        self.batch = workload.make_batch()
        around = way.change(self.net)
        self._around = [around if hasattr(around, "__enter__") else contextlib.nullcontext()]  # no submodule

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        with self._around[0]:
            return self.workload.compute_loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.way.make_optimizer(self.net.parameters())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Same(self.batch, self.num_batches), batch_size=None)


class Tracked(Callback):
    """Tracks until the end of the second step; stands first in the list, so that what others keep is counted.

    Args:
        first: The optimizer's step it begins with: the second one by default.
    """

    def __init__(self, first: int = 1) -> None:
        self._first = first
        self._tracker: MemoryTracker | None = None
        self.row: Row = {}

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._first and self._tracker is None and not self.row:
            self._tracker = track_memory(pl_module, optimizers=trainer.optimizers, inputs=batch)
            self._tracker.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 2 and self._tracker is not None:
            self._tracker.__exit__(None, None, None)
            timeline, self._tracker = self._tracker.timeline, None
            forward_bytes = timeline.peak_by_phase[Phase.FORWARD]
            self.row = {**describe_timeline(timeline), "forward_peak_bytes": forward_bytes}


class Steps(Callback):
    """Times the later steps, from the end of one to the end of the next, and reads their peaks.

    Args:
        num_steps: Timed steps, after those that get ready.
        now: Clock of a host, see :class:`Clock`.
        is_first_counted: Peaks are those of all steps, with the ones that parts look at.
    """

    def __init__(self, num_steps: int, now: Now = time.perf_counter, *, is_first_counted: bool = False) -> None:
        self.num_steps, self._now, self._is_first_counted = num_steps, now, is_first_counted
        self._clock: Clock | None = None
        self._num_done = 0
        self._start = 0.0
        self.row: Row = {}

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        give_back(trainer.strategy.root_device)

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        device = trainer.strategy.root_device
        self._num_done += 1
        if self._num_done == NUM_WARM_UP:
            synchronize(device) if self._is_first_counted else give_back(device)
            self.start()
            self._clock, self._start = Clock(device, self._now), time.perf_counter()
        elif self._clock is not None and not self.row:
            self._clock.mark()
            if self._num_done == NUM_WARM_UP + self.num_steps:
                synchronize(device)
                wall_seconds = (time.perf_counter() - self._start) / self.num_steps
                self.row = {"seconds": self._clock.seconds(), "wall_seconds_per_step": wall_seconds}
                self.row |= {**read_peaks(device), **self.stop()}

    def start(self) -> None:
        """Begin what else there is to measure."""

    def stop(self) -> Row:
        """Return it."""
        return {}


def trainer_options(device: torch.device) -> dict[str, Any]:
    """Return a Trainer's arguments: one quiet device."""
    return {
        "accelerator": accelerator_of(device),
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }


def fit(
    workload: Workload,
    callbacks: list[Callback],
    max_steps: int,
    device: torch.device,
    way: Way = PLAIN,
    seed: int = 0,
    **options: Any,
) -> None:
    """Train; the model is made where it is trained, which is faster for large ones."""
    pl.seed_everything(seed, verbose=False)
    with device:
        model = LitWorkload(workload, max_steps * options.get("accumulate_grad_batches", 1), way)
    trainer = pl.Trainer(**{**trainer_options(device), "max_steps": max_steps, "callbacks": callbacks, **options})
    try:
        trainer.fit(model)
    finally:
        leave_group()


def run_whole(workload: Workload, way: Way, device: torch.device, meter: Any, max_steps: int, seed: int = 0) -> Row:
    """Train by a way's Trainer; return what a callback, which stands first, has found."""
    options = way.make_trainer_options(workload) if way.make_trainer_options is not None else {}
    callbacks = [meter, *options.pop("callbacks", [])]
    if workload.autocast == torch.bfloat16 and not options.keys() & {"precision", "plugins"}:
        options["precision"] = "bf16-mixed"
    fit(workload, callbacks, max_steps, device, way, seed, **options)
    if not meter.row:
        raise RuntimeError(f"{way.name}: the run ended before {max_steps} steps.")
    row: Row = meter.row
    return row
