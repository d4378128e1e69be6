"""How near the streamed step comes to the rate of the disk, which ``--folder`` is on.

In turn and on the same file, with the same threads: all of it read, all of it written, and a fused AdamW step over it.
Each begins with nothing of the file in the page cache, and ends when all of it is on disk. The last two rows are what
training sees: step after step, the page cache as it happens to be; and states in memory.
"""

import mmap
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lightning_vram.optimizers.on_disk import NUM_THREADS, StreamedStates
from lightning_vram.optimizers.step_round import StepRound
from tests.benchmarks.compare import Options
from tests.benchmarks.measure import Row, compare_seconds, in_turns, time_call

SETTINGS: dict[str, Any] = {"repeats": 5, "parameters": 8, "folder": ""}  # of 16 M weights each: 128 MiB of states
QUICK: dict[str, Any] = {"repeats": 2, "parameters": 1}
PARAMETER_ELEMENTS = 2**24
RUN_BYTES = 2**24


class Case:
    """An AdamW with weights and gradients of every size, and states on disk or in memory."""

    def __init__(self, folder: Path | None, num_parameters: int) -> None:
        self.weights = [nn.Parameter(torch.randn(PARAMETER_ELEMENTS)) for _ in range(num_parameters)]
        gradient = torch.randn(PARAMETER_ELEMENTS)
        for weight in self.weights:
            weight.grad = gradient
        self.optimizer = torch.optim.AdamW(self.weights, fused=True)
        self.disk = None if folder is None else StreamedStates(self.optimizer, self.weights, folder)

    def step(self) -> None:
        step_round = StepRound(self.optimizer, is_on_host=True)
        members = step_round.take_rest()
        if self.disk is not None:
            self.disk.run(step_round, members)
        else:
            step_round.run(members)


def take_turns(disk: StreamedStates, *, is_write: bool) -> None:
    """Read or write the whole file, as many runs at a time as there are threads."""
    file = disk._file
    buffers = [memoryview(mmap.mmap(-1, RUN_BYTES)) for _ in range(NUM_THREADS)]

    def move(thread: int) -> None:
        for position in range(thread * RUN_BYTES, disk._file.num_bytes, NUM_THREADS * RUN_BYTES):
            run = buffers[thread][: disk._file.num_bytes - position]
            file.write(run, position) if is_write else file.read(run, position)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(move, range(NUM_THREADS)))


def measure(options: Options) -> Iterator[Row]:
    """Time everything in turn; medians."""
    num_parameters, repeats = options["parameters"], options["repeats"]
    folder = Path(options["folder"] or tempfile.gettempdir())
    on_disk, in_memory = Case(folder, num_parameters), Case(None, num_parameters)
    disk = on_disk.disk
    for case in (on_disk, in_memory):
        case.step()
    cold: dict[str, Callable[[], None]] = {
        "read": lambda: take_turns(disk, is_write=False),
        "streamed step": on_disk.step,
        "write": lambda: take_turns(disk, is_write=True),
    }
    seconds = in_turns({name: partial(_time_cold, disk, run) for name, run in cold.items()}, repeats)
    for name, run in {"step after step": on_disk.step, "in memory": in_memory.step}.items():
        seconds[name] = [time_call(run) for _ in range(repeats + 1)][1:]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    for name, median in medians.items():
        moved = 0 if name == "in memory" else disk._file.num_bytes * (1 if name in ("read", "write") else 2)
        rate = {"rate_of_disk": (medians["read"] + medians["write"]) / median} if name.startswith("st") else {}
        yield {
            "workload": f"AdamW, {num_parameters} x 16 M weights",
            "variant": name,
            "by": "ours" if name.startswith("st") else "plain",
            "file_bytes": disk._file.num_bytes,
            "ring_bytes": sum(one.nbytes for one in disk._buffers),
            **compare_seconds(seconds[name], seconds["in memory"]),
            "gb_per_second": moved / median / 1e9,
            **rate,
            "all_seconds": seconds[name],
        }


def _time_cold(disk: StreamedStates, run: Callable[[], None]) -> float:
    """From nothing of the file in the page cache until all is on disk."""
    _write_out(disk, is_forgotten=True)

    def run_and_write() -> None:
        run()
        _write_out(disk)

    return time_call(run_and_write)


def _write_out(disk: StreamedStates, *, is_forgotten: bool = False) -> None:
    """Wait until all is on disk; let the page cache forget it."""
    file = disk._file._file.fileno()
    os.fsync(file)
    if is_forgotten:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
