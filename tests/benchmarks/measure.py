"""How it is measured: tracked bytes anywhere, allocator peaks and interleaved step times where there is a GPU."""

import contextlib
import gc
import platform
import statistics
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import lightning
import torch
from torch import Tensor, nn

from lightning_vram.memory.tracking.timeline import Category, MemoryTimeline
from lightning_vram.memory.tracking.tracker import track_memory
from tests.benchmarks.cases import Workload
from tests.benchmarks.ways import Way

Row = dict[str, Any]
Now = Callable[[], float]
Found = TypeVar("Found")
DeviceEvent = tuple[str, tuple[int, int]]  # name, and from when to when, in nanoseconds
NUM_WARM_UP = 3  # the first step is observed, the second verified, from the third on all is as it stays


def describe_machine(device: torch.device | None = None) -> Row:
    """Device, driver and versions, as they stand in the file of results."""
    is_cuda = torch.cuda.is_available() if device is None else device.type == "cuda"
    kind = device.type if device is not None and device.type not in ("cpu", "cuda") else platform.machine()
    return {
        "device": torch.cuda.get_device_name() if is_cuda else f"{kind}, {torch.get_num_threads()} threads",
        "processor": _read_processor(),
        "driver": read_driver() if is_cuda else None,
        "cuda": torch.version.cuda if is_cuda else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }


def _read_processor() -> str | None:
    """Return the model of the host's processor, where Linux tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), None)


@cache
def read_driver() -> str | None:
    """Return the version of the GPU's driver, where ``nvidia-smi`` reports it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return None  # figures count without it


def describe_error(error: BaseException, num_lines: int = 12) -> Row:
    """Return what stands in a row instead of figures: what went wrong, and where."""
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    is_full = isinstance(error, torch.OutOfMemoryError)
    return {"error": "out of memory" if is_full else lines[-1][:300], "traceback": lines[-num_lines:]}


def accelerator_of(device: torch.device) -> str:
    """Return what a Trainer calls this kind of device."""
    return "gpu" if device.type == "cuda" else device.type


def synchronize(device: torch.device) -> None:
    """Wait for what was launched."""
    if device.type != "cpu":
        torch.accelerator.synchronize()


def give_back(device: torch.device) -> None:
    """Free what nobody uses, and begin to look for a peak."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.synchronize()
        torch.accelerator.empty_cache()
        torch.get_device_module(device).reset_peak_memory_stats()


def read_allocated(device: torch.device) -> int | None:
    """Return the bytes of the device's allocator that are in use."""
    return torch.get_device_module(device).memory_allocated() if device.type != "cpu" else None


def read_peaks(device: torch.device) -> Row:
    """Return the peaks since :func:`give_back`; nothing on the host, which has no such allocator."""
    if device.type == "cpu":
        return {}
    module = torch.get_device_module(device)
    return {
        "max_memory_allocated_bytes": module.max_memory_allocated(),
        "max_memory_reserved_bytes": module.max_memory_reserved(),
    }


def measure_apart(function: Callable[..., Row], *arguments: Any) -> Row:
    """Return the row that a function makes in a new process, or its error: one that is killed is a row as well."""
    try:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            return pool.submit(function, *arguments).result()
    except Exception as error:
        return error_row(error)


def error_row(error: BaseException) -> Row:
    """Return what stands in a table instead of figures: one line, and the traceback, which is not shown."""
    row = describe_error(error)
    if not isinstance(error, torch.OutOfMemoryError):
        row["error"] = " ".join("".join(traceback.format_exception_only(error)).split())[:300]
    return {"error": row["error"], "all_traceback": row["traceback"]}


def in_turns(runs: Mapping[str, Callable[[], Found]], repeats: int) -> dict[str, list[Found]]:
    """Call each in turn, several times, so that a drifting machine hits them alike; return what each returned."""
    found: dict[str, list[Found]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            found[name].append(run())
    return found


def time_call(run: Callable[[], object], now: Now = time.perf_counter) -> float:
    """Return the seconds that a call takes."""
    start = now()
    run()
    return now() - start


def compare_seconds(seconds: Sequence[float], firsts: Sequence[float]) -> Row:
    """Sum up one way's seconds per step, beside those that the first way had in the same turns."""
    row: Row = {"seconds_per_step": statistics.median(seconds)}
    if ratios := [one / first for one, first in zip(seconds, firsts, strict=False)]:
        row["seconds_of_first"] = statistics.median(ratios)
        row |= {"seconds_of_first_low": min(ratios), "seconds_of_first_high": max(ratios)}
    return row


def describe_timeline(timeline: MemoryTimeline) -> Row:
    """Return the bytes of a tracked step."""
    return {
        "peak_bytes": timeline.peak_bytes,
        "saved_for_backward_bytes": timeline.saved_for_backward_bytes,
        "activations_peak_bytes": timeline.peak_of(Category.ACTIVATIONS),
        **({"host_peak_bytes": timeline.host_peak_bytes} if timeline.device != "cpu" else {}),
        "all_bytes_of_peak": {str(category): size for category, size in timeline.peak_by_category.items()},
    }


class Clock:
    """Marks in what a device computes; the host does not wait for them. The first one is made at once.

    Args:
        device: That computes.
        now: Seconds, where it is not a GPU: by the clock on the wall, or of the processor.
    """

    def __init__(self, device: torch.device, now: Now = time.perf_counter) -> None:
        self._device, self._now = device, now
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(self._now())

    def seconds(self) -> list[float]:
        """Between one mark and the next, once the device was waited for."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if self._device.type == "cuda":
            return [one.elapsed_time(other) / 1e3 for one, other in pairs]
        return [other - one for one, other in pairs]


class Run:
    """One workload trained in one way by a plain loop, ready to take steps; another seed, other weights and data."""

    def __init__(self, workload: Workload, way: Way, device: torch.device, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self._workload = workload
        with device:
            self.model: nn.Module = workload.make_model()
            self.batch = workload.make_batch()
        around = way.change(self.model)
        self._around: Any = around if hasattr(around, "__enter__") else contextlib.nullcontext()
        self.optimizer = way.make_optimizer(self.model.parameters())
        self._steps_in_backward = way.steps_in_backward

    def forward(self) -> Tensor:
        device_type, dtype = self.batch[0].device.type, self._workload.autocast
        autocast = torch.autocast(device_type, dtype) if dtype is not None else contextlib.nullcontext()
        with autocast, self._around:
            return self._workload.compute_loss(self.model, self.batch)

    def step(self) -> None:
        if self._steps_in_backward:
            self.optimizer.step(lambda: self.forward().backward())
        else:
            self.forward().backward()
            self.optimizer.step()
        self.optimizer.zero_grad()

    def measure_kept(self) -> Row:
        """Bytes that the device holds longer from the forward to the backward."""
        device = self.batch[0].device
        before = read_allocated(device)
        loss = self.forward()
        synchronize(device)  # copies to the host are over
        after = read_allocated(device)
        loss.backward()
        self.optimizer.zero_grad()
        return {"kept_bytes": after - before} if before is not None and after is not None else {}


def track_step(workload: Workload, way: Way, device: torch.device) -> Row:
    """Return the bytes of the second step: the first makes the optimizer's state."""
    run = Run(workload, way, device)
    run.step()
    with track_memory(run.model, optimizers=[run.optimizer], inputs=run.batch) as tracker:
        run.step()
    return describe_timeline(tracker.timeline)


def take_turn(
    workload: Workload, way: Way, device: torch.device, num_steps: int, seed: int, now: Now = time.perf_counter
) -> Row:
    """A new model: a few steps to get ready, timed steps, and one that shows what is kept for the backward."""
    run = Run(workload, way, device, seed)
    for _ in range(NUM_WARM_UP):
        run.step()
    give_back(device)
    clock = Clock(device, now)
    start = time.perf_counter()
    for _ in range(num_steps):
        run.step()
        clock.mark()
    synchronize(device)
    wall_seconds = (time.perf_counter() - start) / num_steps
    row = {"seconds": clock.seconds(), "wall_seconds_per_step": wall_seconds, **read_peaks(device)}
    return {**row, **run.measure_kept()}


def read_device_events(profiler: Any) -> list[DeviceEvent]:
    """What ran on the GPU while it was profiled."""
    events = profiler.profiler.kineto_results.events()
    cuda = [event for event in events if str(event.device_type()).endswith("CUDA")]
    return [(event.name(), (event.start_ns(), event.start_ns() + event.duration_ns())) for event in cuda]


def sum_up_events(events: Iterable[DeviceEvent]) -> Row:
    """Seconds of kernels, of copies between host and device, and of copies beside kernels."""
    kernels, copies = [], []
    for name, interval in events:
        if "HtoD" in name or "DtoH" in name:
            copies.append(interval)
        elif not name.startswith("Mem"):
            kernels.append(interval)
    computing, copying, either = _busy(kernels), _busy(copies), _busy(kernels + copies)
    return {
        "computing_seconds": computing / 1e9,
        "copying_seconds": copying / 1e9,
        "copying_beside_seconds": (computing + copying - either) / 1e9,
    }


def _busy(intervals: Iterable[tuple[int, int]]) -> int:
    """Length of the union."""
    total, end = 0, 0
    for start, stop in sorted(intervals):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total
