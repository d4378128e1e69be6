"""What freeing gradients before the forward saves and costs, in a Trainer: python -m tests.benchmarks.early_release.

Bytes of the second step are tracked and exact; times are those of the fastest step of each fit, repeats interleaved, as
ratios to plain in the same run: on the host processor time, which other programs disturb least.
"""

import argparse
import statistics
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lightning_vram import EarlyRelease
from lightning_vram.memory.tracking.timeline import Phase
from tests.benchmarks.cases import WORKLOADS, Workload
from tests.benchmarks.measure import Row, synchronize
from tests.benchmarks.micro_batching import NUM_WARM_UP, Bytes, fit
from tests.benchmarks.report import report

NUM_STEPS = 50


class Seconds(Callback):
    """From the end of one step to that of the next."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        device = trainer.strategy.root_device
        synchronize(device)
        self.ends.append(time.process_time() if device.type == "cpu" else time.perf_counter())

    @property
    def of_a_step(self) -> float:
        return min(end - start for start, end in pairwise(self.ends[NUM_WARM_UP:]))


def make_variants() -> dict[str, list[Callback]]:
    return {
        "plain": [],
        "EarlyRelease()": [EarlyRelease()],
        "EarlyRelease(collect_every_n_steps=10)": [EarlyRelease(collect_every_n_steps=10)],
    }


def measure(workload: Workload, repeats: int, device: torch.device | None = None) -> list[Row]:
    rows: list[Row] = []
    seconds: dict[str, list[float]] = {name: [] for name in make_variants()}
    for name, callbacks in make_variants().items():
        bytes_of_step = Bytes()
        fit(workload, [bytes_of_step, *callbacks], 2, device)
        timeline = bytes_of_step.tracker.timeline
        forward_bytes = timeline.peak_by_phase[Phase.FORWARD]
        rows.append(
            {
                "workload": workload.name,
                "variant": name,
                "forward_peak_bytes": forward_bytes,
                "step_peak_bytes": timeline.peak_bytes,
            }
        )
    for _ in range(repeats):
        for name, callbacks in make_variants().items():
            clock = Seconds()
            fit(workload, [clock, *callbacks], NUM_STEPS, device)
            seconds[name].append(clock.of_a_step)
    for row in rows:
        ratios = [one / other for one, other in zip(seconds[row["variant"]], seconds["plain"], strict=True)]
        row["step_peak_of_plain"] = row["step_peak_bytes"] / rows[0]["step_peak_bytes"]
        row["seconds_of_plain"] = statistics.median(ratios) if ratios else None
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.early_release", description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    rows = [row for one in WORKLOADS if one.needs_gpu == has_gpu for row in measure(one, arguments.repeats)]
    report("early_release", rows, arguments.output)


if __name__ == "__main__":
    main()
