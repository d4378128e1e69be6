"""In a Trainer: the precision plugin beside Lightning's, parts that have nothing to do, batches in parts."""

import statistics
from functools import partial
from typing import Any

from lightning_vram import EmptyCache, MicroBatching, VRAMMonitor
from tests.benchmarks import micro_batching, mixed_precision
from tests.benchmarks.cases import Workload
from tests.benchmarks.fsdp_offload import NUM_WARM_UP, Meter
from tests.benchmarks.gpu_day.items import Item, Setting
from tests.benchmarks.gpu_day.report import Report
from tests.benchmarks.gpu_day.speed import workload_of
from tests.benchmarks.measure import Row, give_back

PLUGINS = ("Lightning bf16-mixed", "bf16", "bf16, recast")
IDLE = {
    "plain": lambda: [],
    "EmptyCache, VRAMMonitor": lambda: [EmptyCache(), VRAMMonitor(path=None)],
    "MicroBatching, fits": lambda: [MicroBatching()],
}


def run_precision(setting: Setting, report: Report, *, key: str) -> None:
    """Add a row for each plugin."""
    repeats = 1 if setting.is_tiny else 5
    rows = mixed_precision.measure(workload_of(key, setting), repeats, setting.device, PLUGINS)
    report.add(*({"name": row["variant"], **row} for row in rows))


def run_micro_batching(setting: Setting, report: Report, *, key: str) -> None:
    """Add a row for each size."""
    rows = micro_batching.measure(workload_of(key, setting), 1 if setting.is_tiny else 3, setting.device)
    report.add(*({"name": row["variant"], **row} for row in rows))


def run_idle(setting: Setting, report: Report, *, key: str) -> None:
    """Add a row for each list of callbacks: whole runs in turns, the device is waited for at their ends only."""
    workload = workload_of(key, setting)
    repeats, steps = (1, 2) if setting.is_tiny else (5, 40)
    seconds: dict[str, list[float]] = {name: [] for name in IDLE}
    for _ in range(repeats):
        for name, make in IDLE.items():
            seconds[name].append(_time_fit(workload, make(), setting, steps))
            give_back(setting.device)
    for name, times in seconds.items():
        ratios = [one / plain for one, plain in zip(times, seconds["plain"], strict=True)]
        row: Row = {"name": name, "seconds_per_step": statistics.median(times), "all_seconds_per_step": times}
        report.add({**row, "seconds_of_first": statistics.median(ratios)})


def _time_fit(workload: Workload, callbacks: list[Any], setting: Setting, num_steps: int) -> float:
    meter = Meter(num_steps)
    micro_batching.fit(workload, [meter, *callbacks], NUM_WARM_UP + num_steps, setting.device)
    return meter.row["seconds_per_step"]


WITH_GOALS = (
    Item("fits.precision.gpt2_small", 60, partial(run_precision, key="gpt2_small")),
    Item("fits.idle.gpt2_small", 60, partial(run_idle, key="gpt2_small")),
    Item("fits.precision.resnet50", 60, partial(run_precision, key="resnet50_bf16")),
)
OTHERS = (
    Item("fits.micro_batching.gpt2_small", 70, partial(run_micro_batching, key="gpt2_small")),
    Item("fits.precision.gpt2_xl", 100, partial(run_precision, key="gpt2_xl")),
)
