"""What a plan costs: seconds of the clock and of the processor, each case in a process of its own, without imports."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_vram import plan_memory
from lightning_vram.demos import ByteGPT
from tests.benchmarks.cases import GPU_WORKLOADS
from tests.benchmarks.compare import Options
from tests.benchmarks.measure import Row, measure_apart
from tests.benchmarks.whole_runs import LitWorkload

SETTINGS: dict[str, Any] = {"repeats": 1}
QUICK: dict[str, Any] = {}
LENGTH = 1024


def _gpt() -> tuple[pl.LightningModule, Any]:
    module = ByteGPT(num_layers=32, width=4096, num_heads=32, sequence_length=LENGTH)
    return module, torch.zeros(4, LENGTH + 1, dtype=torch.int64)


def _small() -> tuple[pl.LightningModule, Any]:
    return ByteGPT(num_layers=1, width=32, num_heads=2, sequence_length=16), torch.zeros(2, 17, dtype=torch.int64)


def _resnet() -> tuple[pl.LightningModule, Any]:
    module = LitWorkload(GPU_WORKLOADS["resnet50_bf16"], 1)
    return module, module.batch


CASES: dict[str, tuple[Callable[[], tuple[pl.LightningModule, Any]], dict[str, Any]]] = {
    "6.7 B GPT, 60 GiB": (_gpt, {"budget": "60GiB", "allow": "lossless"}),
    "ResNet-50, 8 GiB": (_resnet, {"budget": "8GiB"}),
    "ResNet-50, 3 GiB, where nothing fits": (_resnet, {"budget": "3GiB"}),
}
"""Module with its batch, arguments of the plan."""
SMALL = "a small GPT that fits"


def plan_case(name: str) -> Row:
    """Plan one case in this process."""
    make, arguments = CASES.get(name, (_small, {}))
    with torch.device("meta"):
        module, batch = make()
    start, processor = time.perf_counter(), time.process_time()
    try:
        plan = plan_memory(module, batch, device="h100", trainer={"precision": "bf16-mixed"}, **arguments)
        found: Row = {"scheme": str(plan.best.scheme), "needed_bytes": plan.peak_bytes}
    except ValueError as error:  # nothing fits
        found = {"why_not": " ".join(str(error).split())}
    return {
        "workload": name,
        "variant": "plan_memory",
        "by": "ours",
        "planning_seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - processor,
        **found,
    }


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each case."""
    for name in [SMALL] if options.is_quick else CASES:
        if options.only in name:
            turns = [measure_apart(plan_case, name) for _ in range(options["repeats"])]
            yield min(turns, key=lambda turn: float(turn.get("planning_seconds", "inf")))
