"""``AutoVRAM`` where the baseline runs out of memory, and plans next to full checkpointing and each feature."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lightning_vram import AutoVRAM
from lightning_vram.demos import ByteGPT
from lightning_vram.memory.device.accelerators import ProcessLimit
from lightning_vram.memory.units import GIB
from tests.benchmarks.cases import GPU_WORKLOADS, Workload, make_tokens
from tests.benchmarks.gpu_day.items import Item, Setting
from tests.benchmarks.gpu_day.results import Report
from tests.benchmarks.gpu_day.speed import workload_of
from tests.benchmarks.measure import NUM_WARM_UP, Row, give_back
from tests.benchmarks.suites import plan
from tests.benchmarks.ways import PLAIN_TRAINER, Way, with_callbacks
from tests.benchmarks.whole_runs import Steps, run_whole

LIMIT_BYTES = 24 * GIB  # of a common card; others share the device meanwhile
BASELINE, AUTO = "baseline", "AutoVRAM()"
KEYS = ("gpt2_small", "resnet50_bf16", "vit_b")


def run(setting: Setting, report: Report, *, key: str) -> None:
    """Add a row for each way."""
    workload, repeats, steps, shares = GPU_WORKLOADS[key], 3, 10, plan.SHARES
    if setting.is_tiny:  # and yet larger than the blocks that an allocator takes
        workload = replace(workload, make_model=partial(ByteGPT, 2, 128, 2, 32), make_batch=_tokens)
        repeats, steps, shares = 1, 1, (0.75,)
    rows = plan.measure_plans(workload, setting.device, repeats, steps, shares)
    report.add(*({"name": row["variant"], **row} for row in rows))


def run_auto(setting: Setting, report: Report) -> None:
    """Add a row for the baseline, which runs out of memory, and one for ``AutoVRAM`` with the same limit."""
    workload, steps = workload_of("gpt_wide", setting), 1
    limit = None
    if not setting.is_tiny:  # planning takes as many steps of the host as there are layers
        workload = replace(workload, name="ByteGPT 12 x 2048, T 1024, B 32, bf16")
        workload = replace(workload, make_model=partial(ByteGPT, 12, 2048, 16, 1024))
        workload = replace(workload, make_batch=partial(make_tokens, 32, 1024))
        steps, limit = 4, ProcessLimit(setting.device, LIMIT_BYTES)
    seen = _Plan(auto := AutoVRAM(cache=False))
    for name, way in {BASELINE: PLAIN_TRAINER, AUTO: with_callbacks(AUTO, lambda: [auto, seen])}.items():
        report.attempt(name, partial(_fit, workload, way, setting.device, steps, seen))
    if limit is not None:
        limit.remove()


def _fit(workload: Workload, way: Way, device: torch.device, steps: int, seen: "_Plan") -> Row:
    start = time.perf_counter()
    try:
        row = run_whole(workload, way, device, Steps(steps, is_first_counted=True), NUM_WARM_UP + steps)
    except torch.OutOfMemoryError as error:
        return {"is_out_of_memory": True, "message": str(error), "notes": getattr(error, "__notes__", [])}
    finally:
        give_back(device)
    return {**row, **seen.row, "limit_bytes": LIMIT_BYTES, "seconds_of_all": time.perf_counter() - start}


class _Plan(Callback):
    """Reads what was planned before the first step."""

    def __init__(self, auto: AutoVRAM) -> None:
        self._auto = auto
        self._start = time.perf_counter()
        self.row: Row = {}

    def setup(self, *_: Any, **__: Any) -> None:
        if self._auto._plan is not None:
            decision = self._auto._plan.decision
            self.row = {"plan": decision.message, "seconds_with_plan": time.perf_counter() - self._start}
            if decision.found is not None:
                taken = decision.found.taken
                self.row |= {"scheme": str(taken.scheme), "predicted_bytes": taken.needed_bytes}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.row["budget_bytes"] = self._auto.budget_bytes


def _tokens() -> tuple[torch.Tensor, ...]:
    return (torch.randint(256, (128, 33)),)


AUTO_PLAN = Item("auto.gpt_600m", 85, run_auto, row_seconds=120, shares=True)
ITEMS = tuple(Item(f"plan.{key}", 150, partial(run, key=key), row_seconds=500) for key in KEYS)
