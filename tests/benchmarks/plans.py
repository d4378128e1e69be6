"""Plans beside the plain run, full checkpointing and each remedy alone: what is predicted, and what it is.

Whole runs of the Trainer in turns, in one process. Peaks are those of all steps, with the ones that parts look at.
On the CPU, whose allocator tells nothing, there are times only.
"""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lightning_vram import ActivationCheckpointing, ActivationOffload, AutoVRAM, InPlaceFusion, plan_memory
from lightning_vram.memory.estimate.calibrate import measure_bus
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.estimate.known_devices import describe_this_device
from lightning_vram.planner import MemoryPlan
from tests.benchmarks.cases import Workload
from tests.benchmarks.measure import NUM_WARM_UP, Row, describe_error, give_back, read_peaks, synchronize
from tests.benchmarks.micro_batching import LitWorkload, fit

Options = dict[str, Any]
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


@dataclass
class Way:
    """One way to train, and what was found of it.

    Args:
        make: Makes arguments of a Trainer.
        row: What is known before it runs.
    """

    make: Callable[[], Options]
    row: Row


class Steps(Callback):
    """Time of the later steps, and peaks of all."""

    def __init__(self, num_steps: int) -> None:
        self._last = NUM_WARM_UP + num_steps - 1
        self._start = 0.0
        self.row: Row = {}

    def on_train_start(self, trainer: pl.Trainer, module: Any) -> None:
        give_back(trainer.strategy.root_device)

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        device = trainer.strategy.root_device
        if batch_idx == NUM_WARM_UP - 1:
            synchronize(device)
            self._start = time.perf_counter()
        if batch_idx == self._last:
            synchronize(device)
            seconds = (time.perf_counter() - self._start) / (self._last - NUM_WARM_UP + 1)
            self.row = {"seconds_per_step": seconds, **read_peaks(device)}


def measure(
    workload: Workload, device: torch.device, repeats: int, num_steps: int, shares: Sequence[float] = SHARES
) -> list[Row]:
    """Return a row for each way: what a plan predicts, and what all of them take.

    Args:
        workload: What is trained.
        device: Where.
        repeats: Turns of each way.
        num_steps: Timed steps in each turn.
        shares: Budgets, of the plain run's peak.
    """
    own: Options = {"precision": "bf16-mixed"} if workload.autocast == torch.bfloat16 else {}
    ways = {PLAIN: Way(lambda: dict(own), {}), FITS: Way(lambda: {**own, "callbacks": [AutoVRAM()]}, {})}
    for name, make in SINGLES.items():
        ways[name] = Way(lambda make=make: {**own, "callbacks": [make()]}, {})  # type: ignore[misc]
    first = {name: _take_turn(workload, way, device, 1) for name, way in ways.items() if name in (PLAIN, FULL)}
    spec = None if device.type == "cpu" else _describe(device)
    plain_bytes = first[PLAIN].get(PEAK) or _plan(workload, spec, None, own).peak_bytes
    budgets = {name_of(share): int(share * plain_bytes) for share in shares}
    if PEAK in first[FULL]:
        budgets[AT_FULL] = first[FULL][PEAK]
    for name, budget_bytes in budgets.items():
        ways[name] = _plan_way(workload, spec, budget_bytes, own)
    turns: dict[str, list[Row]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            if "error" not in way.row and "refused" not in way.row:
                way.row |= (row := _take_turn(workload, way, device, num_steps))
                turns[name] += [row] if "error" not in row else []
    return [
        {"name": name, "workload": workload.name, **way.row, **_sum_up(turns[name], turns[PLAIN])}
        for name, way in ways.items()
    ]


def _plan_way(workload: Workload, spec: DeviceSpec | None, budget_bytes: int, own: Options) -> Way:
    start = time.perf_counter()
    try:
        plan = _plan(workload, spec, budget_bytes, own)
    except ValueError as error:  # nothing fits
        return Way(dict, {"budget_bytes": budget_bytes, "refused": str(error)})
    row = {
        "budget_bytes": budget_bytes,
        "predicted_bytes": plan.peak_bytes,
        "predicted_seconds_of_first": plan.step_time_ratio,
        "planning_seconds": time.perf_counter() - start,
        "scheme": str(plan.best.scheme),
    }
    return Way(plan.trainer_kwargs, row)


def _plan(workload: Workload, spec: DeviceSpec | None, budget_bytes: int | None, own: Options) -> MemoryPlan:
    with torch.device("meta"):
        module = LitWorkload(workload, 1)
    return plan_memory(module, module.batch, device=spec or "cpu", budget=budget_bytes, trainer=own)


def _describe(device: torch.device) -> DeviceSpec:
    """What the driver has of it is not in what is measured."""
    return replace(describe_this_device(), context_bytes=0, bus_bytes_per_s=measure_bus(device))


def _take_turn(workload: Workload, way: Way, device: torch.device, num_steps: int) -> Row:
    steps, options = Steps(num_steps), way.make()
    callbacks = [steps, *options.pop("callbacks", [])]
    try:
        fit(workload, callbacks, NUM_WARM_UP + num_steps, device, **options)
    except Exception as error:
        return describe_error(error)
    finally:
        give_back(device)
    return steps.row


def _sum_up(turns: list[Row], plain: list[Row]) -> Row:
    if not turns or not plain:
        return {}
    seconds = [turn["seconds_per_step"] for turn in turns]
    ratios = [one / other["seconds_per_step"] for one, other in zip(seconds, plain, strict=False)]
    peaks = {name: max(turn[name] for turn in turns) for name in turns[0] if name.endswith("_bytes")}
    return {
        "seconds_per_step": statistics.median(seconds),
        "seconds_of_first": statistics.median(ratios),
        "all_seconds_per_step": [round(one, 6) for one in seconds],
        **peaks,
    }
