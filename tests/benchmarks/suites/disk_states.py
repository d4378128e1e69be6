"""How near the streamed step comes to the rate of the disk, which ``--folder`` is on.

In turn and on the same file, with the same threads: all of it read, all of it written, and a fused AdamW step over it.
Each begins with nothing of the file in the page cache, and ends when all of it is on disk. The last two rows are what
training sees: step after step, the page cache as it happens to be; and states in memory.
"""

import mmap
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_vram.optimizers.moment_forms import StateLayout
from lightning_vram.optimizers.on_disk import DiskStates, Piece
from tests.benchmarks.compare import Options
from tests.benchmarks.measure import Row, compare_seconds, in_turns, time_call

SETTINGS: dict[str, Any] = {"repeats": 5, "parameters": 8, "folder": ""}  # of 16 M weights each: 128 MiB of states
QUICK: dict[str, Any] = {"repeats": 2, "parameters": 1}
ADAM = StateLayout((("exp_avg", torch.float32), ("exp_avg_sq", torch.float32)), ("step",))
PARAMETER_ELEMENTS = 2**24
RUN_BYTES = 2**24
NUM_THREADS = 4
OPTIONS = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "weight_decay": 0.01, "eps": 1e-8}


class Case:
    """Weights, gradients of every size, and states on disk or in memory."""

    def __init__(self, folder: Path | None, num_parameters: int, num_buffers: int = 4) -> None:
        sizes = [PARAMETER_ELEMENTS] * num_parameters
        self.weights = [torch.randn(size) for size in sizes]
        self.gradient = torch.randn(PARAMETER_ELEMENTS)
        self.states = [{} for _ in sizes]
        self.disk, self.scalars = None, {}
        if folder is not None:
            layouts = [ADAM] * num_parameters
            self.disk = DiskStates(folder, num_buffers=num_buffers, num_threads=NUM_THREADS)
            self.disk.add(sizes, layouts)

    def step(self) -> None:
        if self.disk is not None:
            self.scalars = self.disk.stream(range(len(self.weights)), self._step, self.scalars)
        else:
            self._step([Piece(index, 0, len(weight), self.states[index]) for index, weight in enumerate(self.weights)])

    def _step(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            weight = self.weights[piece.index][piece.start : piece.stop]
            step_adamw(weight, self.gradient[piece.start : piece.stop], piece.states)


def step_adamw(weight: Tensor, gradient: Tensor, states: dict[str, Tensor]) -> None:
    """What ``AdamW(fused=True)`` does, without its overhead."""
    if not states:
        states.update(step=torch.zeros(()), exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
    states["step"] += 1
    lists = [[value] for value in (weight, gradient, states["exp_avg"], states["exp_avg_sq"])]
    torch._fused_adamw_(*lists, [], [states["step"]], amsgrad=False, maximize=False, **OPTIONS)


def take_turns(disk: DiskStates, *, is_write: bool) -> None:
    """Read or write the whole file, as many runs at a time as there are threads."""
    file = disk._file
    buffers = [memoryview(mmap.mmap(-1, RUN_BYTES)) for _ in range(NUM_THREADS)]

    def move(thread: int) -> None:
        for position in range(thread * RUN_BYTES, disk._places.total_bytes, NUM_THREADS * RUN_BYTES):
            run = buffers[thread][: disk._places.total_bytes - position]
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
        moved = 0 if name == "in memory" else disk._places.total_bytes * (1 if name in ("read", "write") else 2)
        rate = {"rate_of_disk": (medians["read"] + medians["write"]) / median} if name.startswith("st") else {}
        yield {
            "workload": f"AdamW, {num_parameters} x 16 M weights",
            "variant": name,
            "by": "ours" if name.startswith("st") else "plain",
            "file_bytes": disk._places.total_bytes,
            "ring_bytes": disk._pipeline.ring_bytes,
            **compare_seconds(seconds[name], seconds["in memory"]),
            "gb_per_second": moved / median / 1e9,
            **rate,
            "all_seconds": seconds[name],
        }


def _time_cold(disk: DiskStates, run: Callable[[], None]) -> float:
    """From nothing of the file in the page cache until all is on disk."""
    _write_out(disk, is_forgotten=True)

    def run_and_write() -> None:
        run()
        _write_out(disk)

    return time_call(run_and_write)


def _write_out(disk: DiskStates, *, is_forgotten: bool = False) -> None:
    """Wait until all is on disk; let the page cache forget it."""
    file = disk._file._file.fileno()
    os.fsync(file)
    if is_forgotten:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
