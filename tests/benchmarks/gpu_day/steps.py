"""The optimizer step alone, with moments in low precision: our own step, and the kernels of torchao and bitsandbytes.

It decides whether ``LowBitOptimizer(library=...)`` stays: compare ``seconds_per_step`` and ``first_step_seconds``.
"""

import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import AdamW
from torch.profiler import ProfilerActivity, profile

from lightning_vram.optimizers.library_moments import Library
from lightning_vram.optimizers.low_precision import LowPrecisionMoments
from lightning_vram.optimizers.moment_forms import FORMS, HostState
from tests.benchmarks.cases import Workload
from tests.benchmarks.gpu_day.items import Item, Setting
from tests.benchmarks.gpu_day.results import Report
from tests.benchmarks.gpu_day.speed import workload_of
from tests.benchmarks.measure import NUM_WARM_UP, Clock, Row, give_back, read_device_events, read_peaks, synchronize
from tests.benchmarks.peers import bitsandbytes, torchao
from tests.benchmarks.peers.installed import needs

NUM_STEPS = 20
_NEEDS = {
    "own": needs(devices=()),
    "torchao": needs(torchao.MODULE, torchao.PIP),
    "bitsandbytes": needs(bitsandbytes.MODULE, bitsandbytes.PIP),
}


@dataclass(frozen=True)
class Variant:
    """An AdamW: its settings, and how its moments are stored and stepped."""

    form: HostState = "fp32"
    library: Library = "own"
    is_fused: bool | None = None


VARIANTS = {
    "plain": Variant(),
    "AdamW(fused=True)": Variant(is_fused=True),
    "MomentsInBF16()": Variant("bf16"),
    "LowBitOptimizer(bits=8)": Variant("8bit"),
    'LowBitOptimizer(bits=8, library="torchao")': Variant("8bit", "torchao"),
    'LowBitOptimizer(bits=8, library="bitsandbytes")': Variant("8bit", "bitsandbytes"),
    "LowBitOptimizer(bits=4)": Variant("4bit"),
    'LowBitOptimizer(bits=4, library="torchao")': Variant("4bit", "torchao"),
}


def run(setting: Setting, report: Report, *, key: str) -> None:
    """Add a row for each variant, and the first one once more as a control."""
    workload = workload_of(key, setting)
    for name, variant in (*VARIANTS.items(), ("plain, again", VARIANTS["plain"])):
        report.attempt(name, partial(_measure, workload, variant, setting))


def _measure(workload: Workload, variant: Variant, setting: Setting) -> Row:
    device = setting.device
    if (why := _NEEDS[variant.library](device)) is not None:
        return {"skipped": why}
    torch.manual_seed(0)
    with device:
        model = workload.make_model()
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
    optimizer = AdamW(model.parameters(), lr=1e-4, fused=variant.is_fused)
    form = FORMS.get(variant.form)
    start = time.perf_counter()
    if form is not None:
        LowPrecisionMoments(model, form, variant.library).attach([optimizer])
    synchronize(device)
    attached = time.perf_counter()
    optimizer.step()
    synchronize(device)
    row: Row = {"attach_seconds": attached - start, "first_step_seconds": time.perf_counter() - attached}
    for _ in range(NUM_WARM_UP):
        optimizer.step()
    give_back(device)
    clock = Clock(device)
    for _ in range(1 if setting.is_tiny else NUM_STEPS):
        optimizer.step()
        clock.mark()
    synchronize(device)
    seconds = clock.seconds()
    row |= {"seconds": seconds, "seconds_per_step": statistics.median(seconds), **read_peaks(device)}
    by = "plain" if form is None else "ours"
    return {"workload": f"{workload.name}, optimizer step alone", "by": by, **row, **_count_kernels(optimizer, device)}


def _count_kernels(optimizer: Any, device: torch.device) -> Row:
    """Return how many kernels and copies a step launches, where CUDA's profiler counts them."""
    if device.type != "cuda":
        return {}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        optimizer.step()
        synchronize(device)
    return {"num_kernels": len(read_device_events(profiler))}


XL = Item("steps.gpt2_xl", 90, partial(run, key="gpt2_xl"), row_seconds=90)
