"""What would make a run fit, and at what cost: an answer that a Trainer takes, and a person reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.estimation.batches import batch_size_of, first_batch
from lightning_vram.estimation.estimate import spec_of
from lightning_vram.estimation.running_trainer import AUTO, check_limit
from lightning_vram.estimation.stages import needed_bytes
from lightning_vram.estimation.step_time import bus_bytes_per_s
from lightning_vram.estimation.traced_fit import STEP, FitRun, trace_fit
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.estimate.workspaces import Workspaces, workspaces_of
from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.memory.units import KIB, format_bytes, parse_bytes
from lightning_vram.planner.effects import effects
from lightning_vram.planner.miss import Ways, find_ways
from lightning_vram.planner.parts import LEVELS, Exactness
from lightning_vram.planner.remedies import Remedies, has_plain_strategy, remedies_for
from lightning_vram.planner.scheme import Scheme
from lightning_vram.planner.search import Found, Measured, Workload, search
from lightning_vram.planner.words import peak_words, ways_out, where

_HOST = "cpu"
# Samples of results, states of generators: parts keep them where tensors have values.
_UNSEEN_BYTES, _UNSEEN_SHARE = 64 * KIB, 0.001
_FORWARD_SHARE = 0.3  # of a step: its backward is twice as long, and the optimizer steps
_STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)
Progress = Callable[[str, float], None]


class PlanError(ValueError):
    """Nothing fits the budget.

    Args:
        least: What came nearest.
        budget_bytes: What there is.
        level: What results might be.
        ways: What else would help.
    """

    def __init__(self, least: Measured, budget_bytes: int, level: Exactness, ways: Ways) -> None:
        super().__init__(
            f"No plan fits {format_bytes(budget_bytes)}. The least that was found is "
            f"{format_bytes(least.needed_bytes)}, by {least.scheme}{where(least)}. {ways_out(least, level, ways)}"
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
        head = (
            f"# {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} on {self.device.name}, "
            f"by a model of time {ratio} of the step as it is.\n"
        )
        return head + self.best.scheme.to_yaml(effects(self.best.scheme, self.found.tried))


def plan_memory(  # noqa: PLR0913 - by name
    module: pl.LightningModule,
    batch: Any = None,
    *,
    device: str | torch.device | DeviceSpec,
    budget: int | float | str | None = None,
    allow: str = "exact",
    trainer: Mapping[str, Any] | None = None,
    datamodule: pl.LightningDataModule | None = None,
    devices: int = 1,
    num_nodes: int = 1,
    on_progress: Progress | None = None,
) -> MemoryPlan:
    """Find the parts that make a run fit, and cost least.

    Args:
        module: Any LightningModule, with weights or on the ``meta`` device.
        batch: As for :func:`lightning_vram.estimate_memory`. Where batches differ, the largest.
        device: As there.
        budget: Bytes of the device, as ``"24GiB"``, or a share of it between 0 and 1. ``None``, ``"auto"``: all that
            it has.
        allow: ``"exact"``: weights are those of the run as it is, to the bit. ``"lossless"``: in exact arithmetic.
            ``"any"``: gradients may differ by a bounded error.
        trainer: Arguments of the Trainer. Parts of the package among them are kept.
        datamodule: Makes the batch.
        devices: Devices on each node.
        num_nodes: Number of nodes.
        on_progress: Is told what is being done, and which part of the work is over, 0 to 1.

    Raises:
        PlanError: If nothing fits. It says what would be the least.
        TypeError: If an argument is of a wrong kind.
        ValueError: If ``allow`` is none of the three, ``budget`` is no size above 0, no share or more than the device
            has, or for the reasons of ``estimate_memory``.
    """
    check_positive_int("plan_memory(devices)", devices)
    check_positive_int("plan_memory(num_nodes)", num_nodes)
    spec, own = spec_of(device), dict(trainer or {})
    level = level_of("plan_memory(allow)", allow)
    budget_bytes = budget_bytes_of("plan_memory(budget)", budget, spec)
    batch = first_batch(module, datamodule) if batch is None else batch
    run = FitRun(own, None if spec.name == _HOST else spec, num_ranks=devices * num_nodes, with_times=True)
    steps = TracedSteps(module, batch, run, on_progress)
    remedies = remedies_for(own, level, on_card=run.card is not None)
    return find_plan(steps, budget_bytes, remedies, level)


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

    Args:
        name: Of the argument, as the user wrote it.
        budget: Bytes, or a share of the device; ``None``, ``"auto"``: all of it.
        spec: Of the device.

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


def find_plan(steps: "TracedSteps", budget_bytes: int, remedies: Remedies, level: Exactness) -> MemoryPlan:
    """Search, and say what came out.

    Args:
        steps: Of the run.
        budget_bytes: What there is.
        remedies: What may be tried.
        level: What results may be.

    Raises:
        PlanError: If nothing fits.
    """
    found = search(steps, Workload(budget_bytes, steps.batch_size, steps.travel_bytes), remedies)
    if found.best is None:
        ways = find_ways(steps, found, budget_bytes, has_strategies=steps.may_choose_strategy)
        raise PlanError(found.least, budget_bytes, level, ways)
    return MemoryPlan(steps.device, budget_bytes, found, steps.own)


class TracedSteps:
    """Runs steps of schemes on tensors without memory.

    Args:
        module: Of the user.
        batch: For it.
        run: As it is, with times.
        on_progress: Is told what is being done.
    """

    def __init__(
        self, module: pl.LightningModule, batch: Any, run: FitRun, on_progress: Progress | None = None
    ) -> None:
        self._module, self._run = module, run
        self._workspaces: Workspaces | None = None if run.card is None else workspaces_of(run.card)
        self._progress = on_progress or (lambda stage, done: None)
        self._num_runs = 0
        self.own, self.batch, self.num_ranks = run.trainer_arguments, batch, run.num_ranks
        self.batch_size = batch_size_of(batch) or 0

    @property
    def device(self) -> DeviceSpec:
        """What they run on."""
        return self._run.card or spec_of(_HOST)

    @property
    def may_choose_strategy(self) -> bool:
        """Whether weights and states may be elsewhere: there is a card, and the user has chosen no strategy for it."""
        return self._run.card is not None and has_plain_strategy(self.own)

    def travel_bytes(self, seconds: float) -> int:
        """Return what the bus carries during the forward of a step that takes so long."""
        return 0 if self._run.card is None else int(bus_bytes_per_s(self._run.card) * seconds * _FORWARD_SHARE)

    def of(self, batch: Any, num_ranks: int) -> "TracedSteps":
        """Return what runs steps with another batch, or on more devices."""
        return TracedSteps(self._module, batch, replace(self._run, num_ranks=num_ranks), self._progress)

    def __call__(self, scheme: Scheme) -> Measured | None:
        """Run one; ``None`` if a part of it refuses this run."""
        self._progress(f"a step with {scheme}", 1 - 0.9**self._num_runs)
        self._num_runs += 1
        try:
            run = replace(self._run, trainer_arguments=scheme.trainer_kwargs(self.own))
            traced = trace_fit(self._module, self.batch, run)
        except Exception:
            if not scheme.parts:  # the user's own run
                raise
            return None
        num_bytes = needed_bytes(traced, self._workspaces)
        return Measured(
            scheme,
            num_bytes + (_UNSEEN_BYTES + int(_UNSEEN_SHARE * num_bytes) if scheme.parts else 0),
            traced.stage(STEP).peak_of(Category.ACTIVATIONS),
            traced.times[STEP],
            sum(traced.timeline.peak_by_category[category] for category in _STATES),
            peak_words(traced.timeline),
            traced.layers,
        )
