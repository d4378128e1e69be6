"""What would make a run fit, and at what cost: an answer that a Trainer takes, and a person reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.estimation.batches import first_batch
from lightning_vram.estimation.estimate import Progress, spec_of
from lightning_vram.estimation.fake_trainer import RunCallbacks, check_run_callbacks
from lightning_vram.estimation.running_trainer.limit import AUTO, check_limit
from lightning_vram.estimation.traced_fit import FitRun
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.host.available import available_host_bytes
from lightning_vram.memory.units import format_bytes, parse_bytes
from lightning_vram.optimizers.on_host import margin_bytes
from lightning_vram.planner.measured import Found, Measured, Workload
from lightning_vram.planner.miss import Ways, find_ways
from lightning_vram.planner.parts import LEVELS, Exactness
from lightning_vram.planner.remedies import Remedies, remedies_for
from lightning_vram.planner.scheme import Scheme
from lightning_vram.planner.search import search
from lightning_vram.planner.traced_steps import HOST, TracedSteps
from lightning_vram.planner.words import ways_out, where


class PlanError(ValueError):
    """Nothing fits the budget.

    Args:
        least: What came nearest.
        workload: What there is.
        level: What results might be.
        ways: What else would help.
    """

    def __init__(self, least: Measured, workload: Workload, level: Exactness, ways: Ways) -> None:
        there, needed, place = format_bytes(workload.budget_bytes), format_bytes(least.needed_bytes), where(least)
        on_host = least.needed_bytes <= workload.budget_bytes
        if on_host:
            there, needed = f"{format_bytes(workload.host_bytes or 0)} of host memory", format_bytes(least.host_bytes)
            place = f", beside which {format_bytes(margin_bytes(least.host_bytes))} must stay free"
        super().__init__(
            f"No plan fits {there}. The least that was found is {needed}, by {least.scheme}{place}. "
            f"{ways_out(least, level, ways, on_host=on_host)}"
        )
        self.ways = ways
        self.least = least

    @property
    def minimum_bytes(self) -> int:
        """The least that was found."""
        return self.least.needed_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """The fastest way that was found to fit a budget.

    Args:
        device: What it is for.
        budget_bytes: What there is.
        found: All that was run.
        own: Arguments of the user's Trainer.
    """

    device: DeviceSpec
    budget_bytes: int
    found: Found
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> Measured:
        """What the plan takes."""
        assert self.found.best is not None  # else there is no plan
        return self.found.best

    @property
    def is_needed(self) -> bool:
        """Whether the run does not fit as it is."""
        return self.best is not self.found.plain

    @property
    def peak_bytes(self) -> int:
        """What the run needs of the device."""
        return self.best.needed_bytes

    @property
    def host_bytes(self) -> int:
        """What a strategy of the plan has at rest on the host of each node, at most."""
        return self.best.host_bytes

    @property
    def step_time_ratio(self) -> float:
        """Seconds of a step, of those of a step as it is, by the planner's model of time."""
        return self.best.seconds / self.found.plain.seconds

    @property
    def runners_up(self) -> tuple[Measured, ...]:
        """Other ways that fit, the fastest first."""
        fitting = [one for one in self.found.tried if one.needed_bytes <= self.budget_bytes and one is not self.best]
        return tuple(sorted(fitting, key=lambda measured: measured.seconds))

    def trainer_kwargs(self) -> dict[str, Any]:
        """Return arguments of a Trainer: the user's own, and the parts of the plan."""
        return self.best.scheme.trainer_kwargs(self.own)

    def to_yaml(self) -> str:
        """Return a configuration for LightningCLI, to be given behind the user's own."""
        ratio = f"{self.step_time_ratio:.2f}" if self.is_needed else "1"
        on_host = f"{format_bytes(self.host_bytes)} of host memory, " if self.host_bytes else ""
        head = (
            f"# {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} on {self.device.name}, {on_host}"
            f"by a model of time {ratio} of the step as it is.\n"
        )
        return head + self.best.scheme.to_yaml(effects(self.best.scheme, self.found.tried))


def plan_memory(  # noqa: PLR0913 - by name
    module: pl.LightningModule,
    batch: Any = None,
    *,
    device: str | torch.device | DeviceSpec,
    budget: int | float | str | None = None,
    host_memory: int | str | None = None,
    allow: str = "exact",
    trainer: Mapping[str, Any] | None = None,
    datamodule: pl.LightningDataModule | None = None,
    devices: int = 1,
    num_nodes: int = 1,
    run_callbacks: RunCallbacks = (),
    on_progress: Progress | None = None,
) -> MemoryPlan:
    """Find the parts that make a run fit, and cost least.

    Args:
        module: Any LightningModule, with weights or on the ``meta`` device.
        batch: As for :func:`lightning_vram.estimate_memory`. Where batches differ, the largest.
        device: As there.
        budget: Bytes of the device, as ``"24GiB"``, or a share of it between 0 and 1. ``None``, ``"auto"``: all that
            it has.
        host_memory: Bytes that the host of each node has for a strategy that has weights or states there, as
            ``"128GiB"``. Where it is too little, ways that take less of it are tried. ``None``: nobody knows.
        allow: ``"exact"``: weights are those of the run as it is, to the bit. ``"lossless"``: in exact arithmetic.
            ``"any"``: gradients, moments and frozen weights may differ by a bounded error.
        trainer: Arguments of the Trainer. Parts of the package among them are kept.
        datamodule: Makes the batch.
        devices: Devices on each node.
        num_nodes: Number of nodes.
        run_callbacks: As for :func:`lightning_vram.estimate_memory`.
        on_progress: Is told what is being done, and which part of the work is over, 0 to 1.

    Raises:
        PlanError: If nothing fits. It says what would be the least.
        TypeError: If an argument is of a wrong kind.
        ValueError: If ``allow`` is none of the three, ``budget`` is no size above 0, no share or more than the device
            has, ``host_memory`` is no size, or for the reasons of ``estimate_memory``.
    """
    check_positive_int("plan_memory(devices)", devices)
    check_positive_int("plan_memory(num_nodes)", num_nodes)
    host_bytes = None if host_memory is None else parse_bytes(host_memory, "plan_memory(host_memory)")
    spec, own = spec_of(device), dict(trainer or {})
    level = level_of("plan_memory(allow)", allow)
    budget_bytes = budget_bytes_of("plan_memory(budget)", budget, spec)
    run = FitRun(
        own,
        None if spec.name == HOST else spec,
        num_ranks=devices * num_nodes,
        with_times=True,
        run_callbacks=check_run_callbacks("plan_memory(run_callbacks)", run_callbacks),
    )
    batch = first_batch(module, datamodule) if batch is None else batch
    steps = TracedSteps(module, batch, run, on_progress, num_local_ranks=devices)
    remedies = remedies_for(own, level, on_card=run.card is not None, module=module, knows_host=host_bytes is not None)
    return find_plan(steps, Workload(budget_bytes, steps.batch_size, steps.travel_bytes, host_bytes), remedies, level)


def level_of(name: str, allow: object) -> Exactness:
    """Return what ``allow`` means.

    Raises:
        ValueError: If it is none of the three.
    """
    if not isinstance(allow, str) or allow not in LEVELS:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, LEVELS))}, got {allow!r}.")
    return LEVELS[allow]


def budget_bytes_of(name: str, budget: int | float | str | None, spec: DeviceSpec) -> int:
    """Return what there is of a device.

    Raises:
        TypeError: If it is of a wrong kind.
        ValueError: If it is no size above 0, no share, or more than there is.
    """
    if budget is None or budget == AUTO:
        return spec.memory_bytes
    check_limit(name, budget)
    if isinstance(budget, float):
        return int(budget * spec.memory_bytes)
    budget_bytes = parse_bytes(budget, name)
    if budget_bytes > spec.memory_bytes:
        has = format_bytes(spec.memory_bytes)
        raise ValueError(f"{name} must be at most the {has} that {spec.name} has, got {budget!r}.")
    return budget_bytes


def find_plan(steps: TracedSteps, workload: Workload, remedies: Remedies, level: Exactness) -> MemoryPlan:
    """Search, and say what came out.

    Raises:
        PlanError: If nothing fits.
    """
    found = search(steps, workload, remedies)
    if found.best is None:
        here = workload if workload.host_bytes is not None else replace(workload, host_bytes=available_host_bytes())
        ways = find_ways(steps, found, here, has_strategies=steps.may_choose_strategy)
        raise PlanError(found.least_of(workload), workload, level, ways)
    return MemoryPlan(steps.device, workload.budget_bytes, found, steps.own)


def effects(scheme: Scheme, tried: Sequence[Measured]) -> tuple[str, ...]:
    """Say what each part changes beside those before it.

    Returns:
        A sentence for each part; an empty one where the steps with and without it are not both among ``tried``.
    """
    steps = [_find(Scheme(scheme.parts[:number]), tried) for number in range(len(scheme.parts) + 1)]
    return tuple(_sentence(before, after) for before, after in pairwise(steps))


def _find(scheme: Scheme, tried: Sequence[Measured]) -> Measured | None:
    return next((measured for measured in tried if measured.scheme == scheme), None)


def _sentence(before: Measured | None, after: Measured | None) -> str:
    if before is None or after is None:
        return ""
    saved_bytes = before.needed_bytes - after.needed_bytes
    change = f"Saves {format_bytes(saved_bytes)}" if saved_bytes >= 0 else f"Takes {format_bytes(-saved_bytes)} more"
    return f"{change}; a step takes {after.seconds / before.seconds:.2f} times as long."
