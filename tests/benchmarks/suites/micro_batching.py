"""Batches in parts, in a Trainer: what is saved, and what it costs."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from lightning.pytorch.callbacks import Callback

from lightning_vram import ActivationCheckpointing, MicroBatching
from tests.benchmarks.cases import Workload
from tests.benchmarks.compare import Options, measure_ways
from tests.benchmarks.measure import Row
from tests.benchmarks.ways import PLAIN_TRAINER, Way, with_callbacks

SETTINGS: dict[str, Any] = {"repeats": 3, "steps": 9}
QUICK: dict[str, Any] = {"repeats": 1, "steps": 2}


def make_ways(workload: Workload) -> list[Way]:
    """Halves, quarters and single samples of the workload's batch."""
    size = len(workload.make_batch()[0])
    quarter = size // 4
    return [
        PLAIN_TRAINER,
        with_callbacks("MicroBatching(), the batch fits", lambda: [MicroBatching()]),
        *(with_callbacks(f"MicroBatching({part})", partial(_split, part)) for part in (size // 2, quarter, 1)),
        with_callbacks(
            f"ActivationCheckpointing(), MicroBatching({quarter})",
            lambda: [ActivationCheckpointing(), MicroBatching(quarter)],
        ),
    ]


def _split(size: int) -> list[Callback]:
    return [MicroBatching(size)]


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each workload and way."""
    for workload in options.workloads():
        ways = options.choose("batches", make_ways(workload))
        yield from measure_ways(workload, ways, options.device, **options.turns)
