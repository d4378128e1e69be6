"""How it is measured: tracked bytes anywhere, allocator peaks and interleaved step times where there is a GPU."""

import contextlib
import gc
import platform
import statistics
import subprocess
import time
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.memory.tracking.tracker import track_memory
from tests.benchmarks.cases import Workload
from tests.benchmarks.variants import COMPILED_VARIANTS, GPU_PEERS, VARIANTS

Row = dict[str, Any]
DeviceEvent = tuple[str, tuple[int, int]]  # name, and from when to when, in nanoseconds
NUM_WARM_UP = 3  # the first step is observed, the second verified, from the third on all is as it stays


def describe_machine(device: torch.device | None = None) -> Row:
    """Device, driver and versions, as they stand in the file of results."""
    is_cuda = torch.cuda.is_available() if device is None else device.type == "cuda"
    kind = device.type if device is not None and device.type not in ("cpu", "cuda") else platform.machine()
    return {
        "device": torch.cuda.get_device_name() if is_cuda else f"{kind}, {torch.get_num_threads()} threads",
        "driver": _read_driver() if is_cuda else None,
        "cuda": torch.version.cuda if is_cuda else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }


def _read_driver() -> str | None:
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


class Clock:
    """Marks in what a device computes; the host does not wait for them. The first one is made at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        """Between one mark and the next, once the device was waited for."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if self._device.type == "cuda":
            return [one.elapsed_time(other) / 1e3 for one, other in pairs]
        return [other - one for one, other in pairs]


class Run:
    """One workload with one technique, ready to take steps."""

    def __init__(self, workload: Workload, variant: str, device: torch.device) -> None:
        torch.manual_seed(0)
        self._workload = workload
        with device:
            self.model: nn.Module = workload.make_model()
            self.batch = workload.make_batch()
        around = {**VARIANTS, **GPU_PEERS, **COMPILED_VARIANTS}[variant](self.model)
        self._around: Any = around if hasattr(around, "__enter__") else contextlib.nullcontext()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)

    def forward(self) -> Tensor:
        device_type, dtype = self.batch[0].device.type, self._workload.autocast
        autocast = torch.autocast(device_type, dtype) if dtype is not None else contextlib.nullcontext()
        with autocast, self._around:
            return self._workload.compute_loss(self.model, self.batch)

    def step(self) -> None:
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


def measure_memory(workload: Workload, variant: str, device: torch.device) -> Row:
    """Track the second step: the first makes the optimizer's state."""
    run = Run(workload, variant, device)
    run.step()
    with track_memory(run.model, optimizers=[run.optimizer], inputs=run.batch) as tracker:
        run.step()
    timeline = tracker.timeline
    return {
        "workload": workload.name,
        "variant": variant,
        "saved_for_backward_bytes": timeline.saved_for_backward_bytes,
        "peak_bytes": timeline.peak_bytes,
        "activations_peak_bytes": timeline.peak_of(Category.ACTIVATIONS),
        **{f"{category}_bytes": size for category, size in timeline.peak_by_category.items()},
    }


def measure_speed(
    workload: Workload, device: torch.device, variants: Sequence[str], num_repeats: int, num_steps: int
) -> list[Row]:
    """Time variants in turn, several times, so that a drifting machine hits them alike; report medians.

    Args:
        workload: What is trained.
        device: Where.
        variants: The first is what others are compared with.
        num_repeats: Turns of each variant.
        num_steps: Timed steps in each turn.

    Returns:
        A row for each variant; one that fails, for want of memory say, has an error in its place, and others go on.
    """
    turns: dict[str, list[Row]] = {variant: [] for variant in variants}
    errors: dict[str, Row] = {}
    for _ in range(num_repeats):
        for variant in variants:
            if variant not in errors:
                try:
                    turns[variant].append(take_turn(workload, variant, device, num_steps))
                except Exception as error:
                    errors[variant] = describe_error(error)
                give_back(device)
    rows = []
    for variant in variants:
        row = {"workload": workload.name, "variant": variant}
        rows.append({**row, **(errors.get(variant) or _sum_up(turns[variant], turns[variants[0]]))})
    return rows


def take_turn(workload: Workload, variant: str, device: torch.device, num_steps: int) -> Row:
    """A new model: a few steps to get ready, timed steps, and one that shows what is kept for the backward."""
    run = Run(workload, variant, device)
    for _ in range(NUM_WARM_UP):
        run.step()
    give_back(device)
    clock = Clock(device)
    start = time.perf_counter()
    for _ in range(num_steps):
        run.step()
        clock.mark()
    synchronize(device)
    wall_seconds = (time.perf_counter() - start) / num_steps
    row = {"seconds": clock.seconds(), "wall_seconds_per_step": wall_seconds, **read_peaks(device)}
    return {**row, **run.measure_kept()}


def _sum_up(turns: list[Row], others: list[Row]) -> Row:
    medians = [statistics.median(turn["seconds"]) for turn in turns]
    ratios = [one / statistics.median(other["seconds"]) for one, other in zip(medians, others, strict=False)]
    return {
        "seconds_per_step": statistics.median(medians),
        "seconds_of_first": statistics.median(ratios) if ratios else None,
        "wall_seconds_per_step": statistics.median([turn["wall_seconds_per_step"] for turn in turns]),
        "all_seconds_per_step": [[round(seconds, 6) for seconds in turn["seconds"]] for turn in turns],
        **{name: value for name, value in turns[-1].items() if name.endswith("_bytes")},
    }


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
