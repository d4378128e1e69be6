"""Plans of the planner on the GPU, beside plain, full checkpointing and each remedy alone."""

from dataclasses import replace
from functools import partial

import torch

from lightning_vram.demos import ByteGPT
from tests.benchmarks.cases import GPU_WORKLOADS
from tests.benchmarks.gpu_day.items import Item, Setting
from tests.benchmarks.gpu_day.results import Report
from tests.benchmarks.suites import plan

KEYS = ("gpt2_small", "resnet50_bf16", "vit_b")


def run(setting: Setting, report: Report, *, key: str) -> None:
    """Add a row for each way."""
    workload, repeats, steps, shares = GPU_WORKLOADS[key], 3, 10, plan.SHARES
    if setting.is_tiny:  # and yet larger than the blocks that an allocator takes
        workload = replace(workload, make_model=partial(ByteGPT, 2, 128, 2, 32), make_batch=_tokens)
        repeats, steps, shares = 1, 1, (0.75,)
    rows = plan.measure_plans(workload, setting.device, repeats, steps, shares)
    report.add(*({"name": row["variant"], **row} for row in rows))


def _tokens() -> tuple[torch.Tensor, ...]:
    return (torch.randint(256, (128, 33)),)


ITEMS = tuple(Item(f"plan.{key}", 150, partial(run, key=key), row_seconds=500) for key in KEYS)
