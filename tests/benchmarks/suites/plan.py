"""Plans beside the plain run, full checkpointing and each remedy alone: what is predicted, and what it is.

Whole runs of the Trainer in turns, in one process. Peaks are those of all steps, with the ones that parts look at.
On the CPU, whose allocator tells nothing, the second step is tracked: there parts still look at what they meet.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback

from lightning_vram import ActivationCheckpointing, ActivationOffload, AutoVRAM, InPlaceFusion, plan_memory
from lightning_vram.memory.estimate.device_spec import DeviceSpec, describe_this_device
from lightning_vram.memory.estimate.workspaces import measure_bus
from lightning_vram.planner import MemoryPlan
from tests.benchmarks.cases import Workload
from tests.benchmarks.compare import Options, measure_ways
from tests.benchmarks.measure import Row
from tests.benchmarks.ways import Way, with_callbacks
from tests.benchmarks.whole_runs import LitWorkload

SETTINGS: dict[str, Any] = {"repeats": 5, "steps": 5}
QUICK: dict[str, Any] = {"repeats": 1, "steps": 2}
Trainer = dict[str, Any]  # its arguments
PLAIN, FITS, FULL = "plain", "AutoVRAM(), the run fits", "ActivationCheckpointing()"
AT_FULL = "plan, at the peak of full checkpointing"
SHARES = (0.75, 0.5, 0.33)
PEAK = "max_memory_reserved_bytes"
SINGLES: dict[str, Callable[[], Callback]] = {
    FULL: ActivationCheckpointing,
    "InPlaceFusion()": InPlaceFusion,
    "ActivationOffload()": ActivationOffload,
}


def name_of(share: float) -> str:
    """Return the name of a plan's row."""
    return f"plan, {share} of plain"


def measure(options: Options) -> Iterator[Row]:
    """Yield a row for each workload and way."""
    for workload in options.workloads():
        shares = SHARES[:1] if options.is_quick else SHARES
        yield from measure_plans(workload, options.device, **options.turns, shares=shares)


def measure_plans(
    workload: Workload, device: torch.device, repeats: int, steps: int, shares: Sequence[float] = SHARES
) -> list[Row]:
    """Return a row for each way: what a plan predicts, and what all of them take.

    Args:
        workload: What is trained.
        device: Where.
        repeats: Turns of each way.
        steps: Timed steps in each turn.
        shares: Budgets, of the plain run's peak.
    """
    own: Trainer = {"precision": "bf16-mixed"} if workload.autocast == torch.bfloat16 else {}
    ways = [
        Way(PLAIN, "plain", make_trainer_options=lambda _: {}),
        with_callbacks(FITS, lambda: [AutoVRAM(cache=False)]),
    ]
    ways += [with_callbacks(name, lambda make=make: [make()]) for name, make in SINGLES.items()]
    compare = partial(measure_ways, workload, device=device, is_tracked=device.type == "cpu", is_first_counted=True)
    first = {row["variant"]: row for row in compare([ways[0], ways[2]], repeats=1, steps=1)}
    spec = None if device.type == "cpu" else _describe(device)
    plain_bytes = first[PLAIN].get(PEAK) or _plan(workload, spec, None, own).peak_bytes
    budgets = {name_of(share): int(share * plain_bytes) for share in shares}
    if PEAK in first[FULL]:
        budgets[AT_FULL] = first[FULL][PEAK]
    facts: dict[str, Row] = {}
    for name, budget_bytes in budgets.items():
        way, facts[name] = _plan_way(name, workload, spec, budget_bytes, own)
        ways.append(way)
    return [{**row, **facts.get(row["variant"], {})} for row in compare(ways, repeats=repeats, steps=steps)]


def _plan_way(
    name: str, workload: Workload, spec: DeviceSpec | None, budget_bytes: int, own: Trainer
) -> tuple[Way, Row]:
    start = time.perf_counter()
    try:
        plan = _plan(workload, spec, budget_bytes, own)
    except ValueError as error:  # nothing fits
        text = " ".join(str(error).split())
        return Way(name, "ours", why_not=lambda device: text), {"budget_bytes": budget_bytes}
    row = {
        "budget_bytes": budget_bytes,
        "predicted_bytes": plan.peak_bytes,
        "predicted_seconds_of_first": plan.step_time_ratio,
        "planning_seconds": time.perf_counter() - start,
        "scheme": str(plan.best.scheme),
    }
    return Way(name, "ours", make_trainer_options=lambda workload: plan.trainer_kwargs()), row


def _plan(workload: Workload, spec: DeviceSpec | None, budget_bytes: int | None, own: Trainer) -> MemoryPlan:
    with torch.device("meta"):
        module = LitWorkload(workload, 1)
    return plan_memory(
        module, module.batch, device=spec or "cpu", budget=budget_bytes and f"{budget_bytes}B", trainer=own
    )


def _describe(device: torch.device) -> DeviceSpec:
    """What the driver has of it is not in what is measured."""
    return replace(describe_this_device(), context_bytes=0, bus_bytes_per_s=measure_bus(device))
