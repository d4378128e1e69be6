"""What ``LeakDetector`` costs in a run without a leak: whole fits in turn, and what its hook takes by itself.

On the host times are of the processor, which other programs disturb least.
"""

import statistics
import time
from collections.abc import Iterator
from typing import Any

from lightning_vram.callbacks.leak_detector import LeakDetector
from tests.benchmarks.cases import Workload, make_gpt
from tests.benchmarks.compare import Options, measure_ways
from tests.benchmarks.measure import NUM_WARM_UP, Row
from tests.benchmarks.ways import PLAIN_TRAINER, with_callbacks

SETTINGS: dict[str, Any] = {"repeats": 5, "steps": 100}
QUICK: dict[str, Any] = {"repeats": 1, "steps": 3}
SHAPES = ((2, 64, 2, 64), (4, 128, 4, 128))  # layers, width, heads, tokens


class TimedDetector(LeakDetector):
    """Adds up what its hook takes."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0

    def on_train_batch_end(self, *arguments: Any) -> None:
        start = time.process_time()
        super().on_train_batch_end(*arguments)
        self.seconds += time.process_time() - start


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each model, plain and with the detector."""
    for shape in SHAPES[:1] if options.is_quick else SHAPES:
        num_layers, width, _, length = shape
        name = f"ByteGPT {num_layers} x {width}, T {length}, B 8"
        if options.only in name:
            yield from _measure(make_gpt(name, 8, *shape), options)


def _measure(workload: Workload, options: Options) -> list[Row]:
    detectors: list[TimedDetector] = []

    def make() -> list[TimedDetector]:
        detectors.append(TimedDetector())
        return detectors[-1:]

    ways = (PLAIN_TRAINER, with_callbacks("LeakDetector()", make))
    rows = measure_ways(workload, ways, options.device, is_tracked=False, now=time.process_time, **options.turns)
    own = [detector.seconds / (NUM_WARM_UP + options["steps"]) for detector in detectors]
    num_leaks = sum(len(detector.leaks) for detector in detectors)
    return [rows[0], {**rows[1], "seconds_of_hook": statistics.median(own), "leaks_reported": num_leaks}]
