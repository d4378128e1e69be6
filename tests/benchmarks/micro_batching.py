"""What splitting a batch saves and costs, through a Trainer: python -m tests.benchmarks.micro_batching.

Bytes are tracked and exact; times are medians of steps, repeats interleaved, as ratios to plain in the same run.
"""

import argparse
import contextlib
import statistics
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_vram import ActivationCheckpointing, MicroBatching
from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.memory.tracking.tracker import MemoryTracker, track_memory
from tests.benchmarks.cases import WORKLOADS, Workload
from tests.benchmarks.measure import Row, accelerator_of, synchronize
from tests.benchmarks.report import report

NUM_STEPS = 12
NUM_WARM_UP = 3


class Same(Dataset):
    """One batch, again and again."""

    def __init__(self, batch: tuple[Tensor, ...], num_batches: int = NUM_STEPS) -> None:
        self.batch = batch
        self.num_batches = num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return self.batch


class LitWorkload(pl.LightningModule):
    def __init__(self, workload: Workload, num_batches: int) -> None:
        super().__init__()
        self.workload = workload
        self.num_batches = num_batches
        self.net: nn.Module = workload.make_model()
        self.batch = workload.make_batch()

    def training_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> Tensor:
        return self.workload.compute_loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.parameters())

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Same(self.batch, self.num_batches), batch_size=None)


class Bytes(Callback):
    """Tracks the second step; stands first in the list, so that what others keep is counted."""

    def __init__(self) -> None:
        self.tracker: MemoryTracker | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.tracker = track_memory(pl_module, optimizers=trainer.optimizers, inputs=batch)
            self.tracker.__enter__()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.tracker is not None:
            self.tracker.__exit__(None, None, None)


class Seconds(Callback):
    """Of every step but the first."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_train_batch_start(self, *args: Any) -> None:
        self.start = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        synchronize(trainer.strategy.root_device)
        self.seconds.append(time.perf_counter() - self.start)


def make_variants(batch_size: int) -> dict[str, list[Callback]]:
    sizes = {f"MicroBatching({size})": [MicroBatching(size)] for size in (batch_size // 2, batch_size // 4, 1)}
    return {
        "plain": [],
        "MicroBatching(), the batch fits": [MicroBatching()],
        **sizes,
        f"ActivationCheckpointing(), MicroBatching({batch_size // 4})": [
            ActivationCheckpointing(),
            MicroBatching(batch_size // 4),
        ],
    }


def fit(
    workload: Workload, callbacks: list[Callback], max_steps: int, device: torch.device | None = None, **options: Any
) -> None:
    """Train; on ``device`` the model is made where it is trained, which is faster for large ones."""
    pl.seed_everything(0, verbose=False)
    with device or contextlib.nullcontext():
        model = LitWorkload(workload, max_steps)
    trainer = pl.Trainer(
        accelerator=accelerator_of(device) if device is not None else "auto",
        devices=1,
        max_steps=max_steps,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    trainer.fit(model)


def measure(workload: Workload, repeats: int, device: torch.device | None = None) -> list[Row]:
    batch_size = len(workload.make_batch()[0])
    rows, seconds = [], {name: [] for name in make_variants(batch_size)}
    for name, callbacks in make_variants(batch_size).items():
        bytes_of_step = Bytes()
        fit(workload, [bytes_of_step, *callbacks], 2, device)
        timeline = bytes_of_step.tracker.timeline
        rows.append(
            {
                "workload": workload.name,
                "variant": name,
                "activations_bytes": timeline.peak_of(Category.ACTIVATIONS),
                "peak_bytes": timeline.peak_bytes,
            }
        )
    for _ in range(repeats):
        for name, callbacks in make_variants(batch_size).items():
            clock = Seconds()
            fit(workload, [clock, *callbacks], NUM_STEPS, device)
            seconds[name].append(statistics.median(clock.seconds[NUM_WARM_UP:]))
    plain = rows[0]
    for row in rows:
        row["activations_of_plain"] = row["activations_bytes"] / plain["activations_bytes"]
        row["peak_of_plain"] = row["peak_bytes"] / plain["peak_bytes"]
        ratios = [one / other for one, other in zip(seconds[row["variant"]], seconds["plain"], strict=True)]
        row["seconds_of_plain"] = statistics.median(ratios) if ratios else None
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.micro_batching", description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    rows = [row for one in WORKLOADS if one.needs_gpu == has_gpu for row in measure(one, arguments.repeats)]
    report("micro_batching", rows, arguments.output)


if __name__ == "__main__":
    main()
