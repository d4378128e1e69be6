"""What freeing gradients before the forward saves and costs, in a Trainer.

On the host times are of the processor, which other programs disturb least.
"""

import time
from collections.abc import Iterator
from typing import Any

from lightning_vram import EarlyRelease
from tests.benchmarks.compare import Options, measure_ways
from tests.benchmarks.measure import Row
from tests.benchmarks.ways import PLAIN_TRAINER, with_callbacks

SETTINGS: dict[str, Any] = {"repeats": 7, "steps": 47}
QUICK: dict[str, Any] = {"repeats": 1, "steps": 2}
WAYS = (
    PLAIN_TRAINER,
    with_callbacks("EarlyRelease()", lambda: [EarlyRelease()]),
    with_callbacks("EarlyRelease(collect_every_n_steps=10)", lambda: [EarlyRelease(collect_every_n_steps=10)]),
)


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each workload and way."""
    for workload in options.workloads():
        yield from measure_ways(workload, WAYS, options.device, now=time.process_time, **options.turns)
