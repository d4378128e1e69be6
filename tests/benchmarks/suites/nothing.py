"""The pack with nothing to do: parts in a Trainer whose run fits, and the import alone.

On the host times are of the processor, which other programs disturb least. The import is measured in whole processes
in turn, with the Python calls of a step.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from lightning_vram import AutoVRAM, EmptyCache, MicroBatching, VRAMMonitor
from tests.benchmarks.compare import Options, measure_ways
from tests.benchmarks.measure import Row, compare_seconds, in_turns
from tests.benchmarks.ways import PLAIN_TRAINER, with_callbacks

SETTINGS: dict[str, Any] = {"repeats": 5, "steps": 40}
QUICK: dict[str, Any] = {"repeats": 1, "steps": 3}
WAYS = (
    PLAIN_TRAINER,
    with_callbacks("EmptyCache(), VRAMMonitor()", lambda: [EmptyCache(), VRAMMonitor(path=None)]),
    with_callbacks("MicroBatching(), the batch fits", lambda: [MicroBatching()]),
    with_callbacks("AutoVRAM(), the run fits", lambda: [AutoVRAM(cache=False)]),
)
_STEP = Path(__file__).with_name("trainer_step.py")
_IMPORTS = {"plain": "not imported", "ours": "import lightning_vram"}


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each workload and way, and for the import."""
    for workload in options.workloads():
        yield from measure_ways(
            workload, WAYS, options.device, is_tracked=False, now=time.process_time, **options.turns
        )
    yield from measure_import(options["repeats"])


def measure_import(repeats: int) -> Iterator[Row]:
    """Yield a row of a Trainer's steps with the package imported, and without."""
    runs: dict[str, Callable[[], dict[str, float]]] = {by: partial(_train_apart, by) for by in _IMPORTS}
    found = in_turns(runs, repeats)
    seconds = {by: [run["seconds"] for run in turns] for by, turns in found.items()}
    for by, name in _IMPORTS.items():
        row = {"workload": "BoringModel, nothing switched on", "variant": name, "by": by}
        yield {**row, **compare_seconds(seconds[by], seconds["plain"]), "python_calls": found[by][0]["calls"]}


def _train_apart(by: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, _STEP, by], capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found
