"""How it is measured: tracked bytes anywhere, allocator peaks and interleaved step times where there is a GPU."""

import contextlib
import platform
import statistics
import subprocess
import time
from typing import Any

import lightning
import torch
from torch import nn

from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.memory.tracking.tracker import track_memory
from tests.benchmarks.cases import Workload
from tests.benchmarks.variants import COMPILED_VARIANTS, GPU_PEERS, VARIANTS

Row = dict[str, Any]


def describe_machine() -> Row:
    """Device, driver and versions, as they stand in the file of results."""
    is_cuda = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name()
        if is_cuda
        else f"{platform.machine()}, {torch.get_num_threads()} threads",
        "driver": _read_driver() if is_cuda else None,
        "cuda": torch.version.cuda if is_cuda else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": lightning.__version__,
    }


def _read_driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]


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

    def step(self) -> None:
        device_type, dtype = self.batch[0].device.type, self._workload.autocast
        autocast = torch.autocast(device_type, dtype) if dtype is not None else contextlib.nullcontext()
        with autocast, self._around:
            loss = self._workload.compute_loss(self.model, self.batch)
        loss.backward()
        del loss
        self.optimizer.step()
        self.optimizer.zero_grad()


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
    workload: Workload, device: torch.device, num_repeats: int, num_steps: int, only: str = ""
) -> list[Row]:
    """Time all variants in turn, several times, so that a drifting machine hits them alike; report medians."""
    variants = [*VARIANTS, *({**GPU_PEERS, **COMPILED_VARIANTS} if device.type == "cuda" else ())]
    variants = [variant for variant in variants if variant == "plain" or only in variant]
    seconds: dict[str, list[float]] = {variant: [] for variant in variants}
    peaks: dict[str, Row] = {}
    for _ in range(num_repeats):
        for variant in variants:
            run = Run(workload, variant, device)
            for _ in range(2):
                run.step()
            _synchronize(device)
            if device.type == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            for _ in range(num_steps):
                run.step()
            _synchronize(device)
            seconds[variant].append((time.perf_counter() - start) / num_steps)
            if device.type == "cuda":
                peaks[variant] = {
                    "max_memory_allocated": torch.cuda.max_memory_allocated(),
                    "max_memory_reserved": torch.cuda.max_memory_reserved(),
                }
            del run
    plain = statistics.median(seconds["plain"])
    return [
        {
            "workload": workload.name,
            "variant": variant,
            "seconds_per_step": statistics.median(seconds[variant]),
            "seconds_of_plain": statistics.median(seconds[variant]) / plain,
            "all_seconds_per_step": seconds[variant],
            **peaks.get(variant, {}),
        }
        for variant in variants
    ]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
