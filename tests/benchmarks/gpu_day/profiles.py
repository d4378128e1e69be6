"""Where the time goes: kernels, operators, the host. For what has missed its goal, asked for with ``--only``."""

from functools import partial
from typing import Any

from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.gpu_day import fits
from tests.benchmarks.gpu_day.items import Item, Setting
from tests.benchmarks.gpu_day.results import Report
from tests.benchmarks.gpu_day.speed import (
    BESIDE,
    BY_HAND,
    CHECKPOINTED,
    FUSED,
    MATMULS,
    OFFLOADED,
    PLAIN,
    SELECTIVE,
    workload_of,
)
from tests.benchmarks.measure import NUM_WARM_UP, Row, Run, synchronize
from tests.benchmarks.ours import find_way

NUM_STEPS, NUM_LINES = 3, 30


def run(setting: Setting, report: Report, *, key: str, variants: tuple[str, ...]) -> None:
    """Add a row for each variant."""
    for variant in variants:
        report.attempt(variant, partial(_profile, key, variant, setting))


def _profile(key: str, variant: str, setting: Setting) -> Row:
    run = Run(workload_of(key, setting), find_way(variant), setting.device)
    for _ in range(NUM_WARM_UP):
        run.step()
    synchronize(setting.device)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if setting.device.type == "cuda" else [])]
    with profile(activities=activities, acc_events=True) as profiler:
        for _ in range(NUM_STEPS):
            run.step()
        synchronize(setting.device)
    return sum_up(profiler.key_averages())


def sum_up(events: Any) -> Row:
    """Return the longest on the device and on the host, in microseconds of a step, each with its count."""
    return {
        "device_us": _longest(events, "self_device_time_total"),
        "host_us": _longest(events, "self_cpu_time_total"),
        "device_us_of_all": sum(getattr(event, "self_device_time_total", 0) for event in events) / NUM_STEPS,
        "host_us_of_all": sum(event.self_cpu_time_total for event in events) / NUM_STEPS,
    }


def _longest(events: Any, kind: str) -> list[list[Any]]:
    found = sorted(events, key=lambda event: -getattr(event, kind, 0))[:NUM_LINES]
    return [
        [event.key[:120], round(getattr(event, kind, 0) / NUM_STEPS, 1), event.count / NUM_STEPS] for event in found
    ]


def _item(key: str, name: str, *variants: str) -> Item:
    return Item(f"profile.{key}.{name}", 30, partial(run, key=key, variants=variants))


def _sharded_item(key: str, shape: str) -> Item:
    measure = partial(fits.run_sharded, shape=shape, variant=fits.OPTIMIZER, steps=3, is_profiled=True)
    return Item(f"profile.{key}", 38, measure, row_seconds=180)


XL = _sharded_item("xl_16k", "GPT-2 XL, 16 k tokens")
ITEMS = (
    _item("resnet50_bf16", "fusion", PLAIN, FUSED),
    _item("gpt2_xl", "checkpointing", BY_HAND, CHECKPOINTED),
    _item("gpt2_xl", "matmuls", SELECTIVE, MATMULS),
    _item("gpt2_xl", "offload_beside", CHECKPOINTED, BESIDE),
    _item("gpt2_xl", "offload", PLAIN, OFFLOADED),
    _item("gpt2_small", "checkpointing", BY_HAND, CHECKPOINTED),
    _item("gpt2_small", "matmuls", SELECTIVE, MATMULS),
    _sharded_item("xl_8k_clip", "GPT-2 XL, 8 k tokens, clipping"),
)
