"""What LeakDetector costs in a run without a leak: python -m tests.benchmarks.leak_detector.

Fits take turns, plain and with the detector, in one process; times are of whole batches, from one start to the next:
processor time on a host, where others work on the machine, and time by the clock on a GPU. What the detector's hook
takes by itself stands beside it.
"""

import argparse
import json
import statistics
import time
from itertools import chain
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from lightning_vram.callbacks.leak_detector import LeakDetector
from lightning_vram.demos import ByteGPT, SourceText
from tests.benchmarks.measure import Row, describe_machine

SIZES = {"2 x 64, T 64, B 8": (2, 64, 2, 64), "4 x 128, T 128, B 8": (4, 128, 4, 128)}
NUM_WARM_UP = 5
now = time.perf_counter if torch.cuda.is_available() else time.process_time


class BatchTimes(pl.Callback):
    """Seconds from the start of each batch to that of the next."""

    def __init__(self) -> None:
        self._starts: list[float] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Tensor, _: int) -> None:
        self._starts.append(now())

    @property
    def seconds(self) -> list[float]:
        return [end - start for start, end in zip(self._starts, self._starts[1:], strict=False)][NUM_WARM_UP:]


class TimedDetector(LeakDetector):
    """Adds up what its hook takes."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def on_train_batch_end(self, *arguments: Any) -> None:
        start = now()
        super().on_train_batch_end(*arguments)
        self.seconds += now() - start


def fit(shape: tuple[int, ...], num_steps: int, detector: LeakDetector | None) -> list[float]:
    pl.seed_everything(0, verbose=False)
    times = BatchTimes()
    trainer = pl.Trainer(
        accelerator="auto",
        devices=1,
        max_steps=num_steps,
        limit_val_batches=0,
        callbacks=[times, *([] if detector is None else [detector])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(ByteGPT(*shape), SourceText(batch_size=8, sequence_length=shape[-1]))
    return times.seconds


def measure(name: str, num_turns: int, num_steps: int) -> Row:
    turns: dict[str, list[list[float]]] = {"plain": [], "detector": []}
    num_leaks, own = 0, []
    for _ in range(num_turns):
        detector = TimedDetector()
        turns["plain"].append(fit(SIZES[name], num_steps, None))
        turns["detector"].append(fit(SIZES[name], num_steps, detector))
        num_leaks += len(detector.leaks)
        own.append(detector.seconds / num_steps)
    row: Row = {"what": "LeakDetector", "model": f"ByteGPT {name}", "leaks reported": num_leaks}
    for variant, found in turns.items():
        row[f"{variant}, ms (median)"] = 1e3 * statistics.median(list(chain.from_iterable(found)))
        row[f"{variant}, ms (fastest turn's median)"] = 1e3 * min(map(statistics.median, found))
        row[f"{variant}, ms (mean)"] = 1e3 * statistics.mean(list(chain.from_iterable(found)))
    row["hook alone, ms per step (median)"] = 1e3 * statistics.median(own)
    for kind in ("median", "fastest turn's median", "mean"):
        row[f"of plain ({kind})"] = row[f"detector, ms ({kind})"] / row[f"plain, ms ({kind})"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.leak_detector", description=__doc__)
    parser.add_argument("-o", "--output", type=Path, help="JSON file; kept under tests/benchmarks/results/")
    parser.add_argument("--turns", type=int, default=5, help="of each variant")
    parser.add_argument("--steps", type=int, default=100, help="in each turn")
    arguments = parser.parse_args()
    rows = [measure(name, arguments.turns, arguments.steps) for name in SIZES]
    for row in rows:
        print({key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()})
    if arguments.output is not None:
        result = {"suite": "leak_detector", "machine": describe_machine(), "rows": rows}
        arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
