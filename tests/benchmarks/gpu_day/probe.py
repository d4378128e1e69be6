"""What the other figures depend on: PCIe, pinning, forks next to pinned memory, and AdamW on the host."""

import mmap
import os
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lightning_vram.core.host.memory import make_host_tensor
from lightning_vram.memory.device.accelerators import pin_in_place
from lightning_vram.memory.estimate.device_spec import describe_this_device
from lightning_vram.memory.estimate.workspaces import measure_bus
from tests.benchmarks.gpu_day.items import Item, Setting
from tests.benchmarks.gpu_day.results import Report
from tests.benchmarks.gpu_day.schedule import read_host_bytes
from tests.benchmarks.measure import Row
from tests.benchmarks.suites import host_adamw

_BYTES, _TINY_BYTES = 1 << 32, 1 << 24


def run(setting: Setting, report: Report) -> None:
    """Add a row for each."""
    num_bytes = _TINY_BYTES if setting.is_tiny else _BYTES
    is_cuda = setting.device.type == "cuda"
    report.set(host=Path("/proc/meminfo").read_text().splitlines()[:3], num_cores=os.cpu_count())
    if is_cuda:
        report.attempt(
            "bus", lambda: {"bytes_per_s": measure_bus(setting.device), "spec": asdict(describe_this_device())}
        )
    report.attempt("pin in place, and fork", partial(_pin_and_fork, num_bytes, setting))
    for is_huge in (False, True):
        for is_touched in (False, True):
            name = f"pin{', huge pages' * is_huge}{', touched first' * is_touched}"
            report.attempt(name, partial(_pin_mapped, num_bytes, setting, is_huge, is_touched))
    report.attempt("pin by torch", partial(_pin, num_bytes, pin_memory=is_cuda))
    report.attempt("copy on the host", partial(_copy, num_bytes))


def _pin(num_bytes: int, *, pin_memory: bool) -> Row:
    start = time.perf_counter()
    torch.empty(num_bytes, dtype=torch.uint8, pin_memory=pin_memory)
    return {"bytes_per_s": num_bytes / (time.perf_counter() - start)}


def _pin_mapped(num_bytes: int, setting: Setting, is_huge: bool, is_touched: bool) -> Row:
    """What pinning waits for: whether for pages to be found, zeroed, or locked one by one."""
    start = time.perf_counter()
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE)
    if is_huge:
        mapping.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    if is_touched:
        tensor.zero_()
    touched = time.perf_counter()
    is_pinned = pin_in_place(tensor) if setting.device.type == "cuda" else None
    seconds = time.perf_counter() - start
    return {"bytes_per_s": num_bytes / seconds, "seconds_of_touch": touched - start, "is_pinned": is_pinned}


def _copy(num_bytes: int) -> Row:
    source = torch.ones(num_bytes // 8)
    target = torch.ones_like(source)
    start = time.perf_counter()
    target.copy_(source)
    return {"bytes_per_s": 2 * source.nbytes / (time.perf_counter() - start), "threads": torch.get_num_threads()}


def _pin_and_fork(num_bytes: int, setting: Setting) -> Row:
    is_cuda = setting.device.type == "cuda"
    start = time.perf_counter()
    tensor = make_host_tensor(num_bytes, torch.uint8, pin_memory=is_cuda)
    seconds = time.perf_counter() - start
    tensor.fill_(1)
    return {
        "bytes_per_s": num_bytes / seconds,
        "is_pinned": tensor.is_pinned() if is_cuda else None,
        **_fork(tensor),
    }


def _fork(tensor: Tensor) -> Row:
    """Return what a child process costs that only waits, as the worker of a DataLoader does at first."""
    before, start = read_host_bytes("MemAvailable"), time.perf_counter()
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.read(reading, 1)
        os._exit(0)
    seconds, during = time.perf_counter() - start, read_host_bytes("MemAvailable")
    os.write(writing, b"x")
    os.waitpid(pid, 0)
    for end in (reading, writing):
        os.close(end)
    return {"fork_seconds": seconds, "fork_bytes": before - during, "num_bytes": tensor.nbytes}


def run_host_adamw(setting: Setting, report: Report) -> None:
    """Add a row for each way to step AdamW on the host with all its cores."""
    make = partial(host_adamw.make_blocks, *((1, 64) if setting.is_tiny else (4, 1600)))
    num_threads = 1 if setting.is_tiny else os.cpu_count() or 1
    with host_adamw.process_group():
        for row in host_adamw.measure_shards("4 blocks of width 1600", make, num_threads, 3):
            report.add({"name": row["variant"], **row})


HOST_ADAMW = Item("host_adamw", 32, run_host_adamw)
ITEMS = (Item("probe", 15, run, row_seconds=60),)
