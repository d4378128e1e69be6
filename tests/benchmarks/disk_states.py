"""How near the streamed step comes to the rate of the disk: python -m tests.benchmarks.disk_states --folder /nvme.

In turn and on the same file, with the same threads: all of it read, all of it written, and a fused AdamW step over it.
Each begins with nothing of the file in the page cache, and ends when all of it is on disk. The last two rows are what
training sees: step after step, the page cache as it happens to be; and states in memory.
"""

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from lightning_vram.optimizers.on_disk.layouts import StateLayout
from lightning_vram.optimizers.on_disk.pieces import Piece
from lightning_vram.optimizers.on_disk.states import DiskStates
from tests.benchmarks.measure import Row
from tests.benchmarks.report import report

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
        self.disk = None
        if folder is not None:
            layouts = [ADAM] * num_parameters
            self.disk = DiskStates(folder, sizes, layouts, num_buffers=num_buffers, num_threads=NUM_THREADS)

    def step(self) -> None:
        if self.disk is not None:
            self.disk.stream(range(len(self.weights)), self._step)
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
        for position in range(thread * RUN_BYTES, disk.total_bytes, NUM_THREADS * RUN_BYTES):
            run = buffers[thread][: disk.total_bytes - position]
            file.write(run, position) if is_write else file.read(run, position)

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(move, range(NUM_THREADS)))


def measure(folder: Path, num_parameters: int, repeats: int) -> list[Row]:
    """Time everything in turn, ``repeats`` times; medians."""
    on_disk, in_memory = Case(folder, num_parameters), Case(None, num_parameters)
    disk = on_disk.disk
    for case in (on_disk, in_memory):
        case.step()
    cold: dict[str, Callable[[], None]] = {
        "read": lambda: take_turns(disk, is_write=False),
        "streamed step": on_disk.step,
        "write": lambda: take_turns(disk, is_write=True),
    }
    warm = {"step after step": on_disk.step, "in memory": in_memory.step}
    seconds: dict[str, list[float]] = {name: [] for name in (*cold, *warm)}
    for _ in range(repeats):
        for name, run in cold.items():
            _write_out(disk, is_forgotten=True)
            start = time.perf_counter()
            run()
            _write_out(disk)
            seconds[name].append(time.perf_counter() - start)
    for name, run in warm.items():
        for _ in range(repeats + 1):
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
        del seconds[name][0]
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    rows = []
    for name, median in medians.items():
        moved = 0 if name == "in memory" else disk.total_bytes * (1 if name in ("read", "write") else 2)
        rows.append(
            {
                "variant": name,
                "file_bytes": disk.total_bytes,
                "ring_bytes": disk.ring_bytes,
                "seconds": median,
                "gb_per_second": moved / median / 1e9,
                "rate_of_disk": (medians["read"] + medians["write"]) / median if name.startswith("st") else None,
                "all_seconds": seconds[name],
            }
        )
    disk.close()
    return rows


def _write_out(disk: DiskStates, *, is_forgotten: bool = False) -> None:
    """Wait until all is on disk; let the page cache forget it."""
    file = disk._file._file.fileno()
    os.fsync(file)
    if is_forgotten:
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.disk_states", description=__doc__)
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--parameters", type=int, default=8, help="of 16 M weights each: 128 MiB of states")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    report("disk_states", measure(arguments.folder, arguments.parameters, arguments.repeats), arguments.output)


if __name__ == "__main__":
    main()
