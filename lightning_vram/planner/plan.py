"""Plans: trace configurations on fake tensors, and return the fastest that fits with its cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lightning_vram.argument_checks import check_positive_int
from lightning_vram.core.host.memory import margin_bytes
from lightning_vram.estimation.batches import batch_size_of, first_batch
from lightning_vram.estimation.estimate import Progress, needed_bytes, spec_of
from lightning_vram.estimation.fake_trainer import RunCallbacks, check_run_callbacks
from lightning_vram.estimation.running_trainer import AUTO, check_limit
from lightning_vram.estimation.step_time import bus_bytes_per_s
from lightning_vram.estimation.traced_fit import STEP, FitRun, trace_fit
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.estimate.workspaces import Workspaces, workspaces_of
from lightning_vram.memory.host import available_host_bytes
from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.memory.units import KIB, format_bytes, parse_bytes, parse_limit
from lightning_vram.planner.alternatives import (
    Alternatives,
    describe_alternatives,
    describe_peak_place,
    peak_words,
    suggest_alternatives,
)
from lightning_vram.planner.remedies import has_plain_strategy, may_be_guarded, remedies_for
from lightning_vram.planner.scheme import LEVELS, Exactness, Found, Measured, Scheme, Workload, find_measured
from lightning_vram.planner.search import search

HOST = "cpu"
# Samples of results and generator states, which features store only in real runs.
_UNSEEN_BYTES, _UNSEEN_SHARE = 64 * KIB, 0.001
_FORWARD_SHARE = 0.3  # of a step: the rest is backward and optimizer
_STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)


class TracedSteps:
    """Traces steps of schemes on fake tensors; once ``is_late()``, only the baseline.

    ``guards`` are callbacks that repeat a step after OOM, added if all parts allow it. ``tried`` has the traced steps
    in order; ``left_out`` the schemes that were too late.
    """

    def __init__(  # noqa: PLR0913 - by name
        self,
        module: pl.LightningModule,
        batch: Any,
        run: FitRun,
        on_progress: Progress | None = None,
        *,
        num_local_ranks: int = 1,
        guards: Sequence[Callback] = (),
        is_late: Callable[[], bool] = lambda: False,
    ) -> None:
        self._module, self._run = module, run
        self._workspaces: Workspaces | None = None if run.card is None else workspaces_of(run.card)
        self._progress = on_progress or (lambda stage, done: None)
        self._num_runs, self._num_local_ranks, self._guards = 0, num_local_ranks, guards
        self.own, self.batch, self.num_ranks = run.trainer_arguments, batch, run.num_ranks
        self.batch_size = batch_size_of(batch) or 0
        self._is_late = is_late
        self.tried: list[Measured] = []
        self.left_out: list[Scheme] = []

    @property
    def device(self) -> DeviceSpec:
        """The device of the steps."""
        return self._run.card or spec_of(HOST)

    @property
    def may_choose_strategy(self) -> bool:
        """Whether a strategy may offload weights and states: on a GPU, with the default strategy."""
        return self._run.card is not None and has_plain_strategy(self.own)

    def transfer_bytes(self, seconds: float) -> int:
        """Return the D2H bytes during the forward of a step of so many seconds."""
        return 0 if self._run.card is None else int(bus_bytes_per_s(self._run.card) * seconds * _FORWARD_SHARE)

    def of(self, batch: Any, num_ranks: int) -> "TracedSteps":
        """Return tracing with another batch, or on more devices."""
        run, more = replace(self._run, num_ranks=num_ranks), {"num_local_ranks": self._num_local_ranks}
        return TracedSteps(self._module, batch, run, self._progress, guards=self._guards, is_late=self._is_late, **more)

    def __call__(self, scheme: Scheme) -> Measured | None:
        """Trace one; ``None`` if a feature refuses this run, or it is late."""
        if scheme.parts and self._is_late():
            self.left_out += [] if scheme in self.left_out else [scheme]
            return None
        self._progress(f"tracing {scheme}", 1 - 0.9**self._num_runs)
        self._num_runs += 1
        try:
            own = dict(self.own)
            if self._guards and may_be_guarded(part.name for part in scheme.parts):
                own["callbacks"] = [*own["callbacks"], *self._guards]
            run = replace(self._run, trainer_arguments=scheme.trainer_kwargs(own))
            traced = trace_fit(self._module, self.batch, run)
        except Exception:
            if not scheme.parts:  # the user's own run
                raise
            return None
        num_bytes = needed_bytes(traced, self._workspaces)
        measured = Measured(
            scheme,
            num_bytes + (_UNSEEN_BYTES + int(_UNSEEN_SHARE * num_bytes) if scheme.parts else 0),
            traced.stage(STEP).peak_of(Category.ACTIVATIONS),
            traced.times[STEP],
            sum(traced.timeline.peak_by_category[category] for category in _STATES),
            peak_words(traced.timeline),
            traced.layers,
            traced.host_bytes * self._num_local_ranks,
        )
        self.tried.append(measured)
        return measured


class PlanError(ValueError):
    """No configuration fits the budget. The message names the minimum, and alternatives.

    Args:
        least: The configuration that comes nearest.
        workload: Budget and batch.
        level: Exactness that was allowed.
        ways: Alternatives that would fit.
        device_bytes: Memory of the device.
    """

    def __init__(
        self, least: Measured, workload: Workload, level: Exactness, ways: Alternatives, device_bytes: int
    ) -> None:
        there, needed = format_bytes(workload.budget_bytes), format_bytes(least.needed_bytes)
        place = describe_peak_place(least)
        on_host = least.needed_bytes <= workload.budget_bytes
        if on_host:
            there, needed = f"{format_bytes(workload.host_bytes or 0)} of host memory", format_bytes(least.host_bytes)
            place = f", in addition to {format_bytes(margin_bytes(least.host_bytes))} that must stay free"
        super().__init__(
            f"No plan fits {there}. The minimum found is {needed}, with {least.scheme}{place}. "
            f"{describe_alternatives(least, level, ways, device_bytes, on_host=on_host)}"
        )
        self.ways = ways
        self.least = least

    @property
    def minimum_bytes(self) -> int:
        """Device memory of the smallest configuration found, in bytes."""
        return self.least.needed_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """The fastest configuration found that fits a memory budget.

    Args:
        device: Device that the plan is for.
        budget_bytes: Budget in bytes.
        found: All configurations that were traced.
        own: Arguments of the user's Trainer.
    """

    device: DeviceSpec
    budget_bytes: int
    found: Found
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> Measured:
        """The chosen configuration with its memory and time."""
        assert self.found.best is not None  # else there is no plan
        return self.found.best

    @property
    def is_needed(self) -> bool:
        """Whether the baseline exceeds the budget."""
        return self.best is not self.found.plain

    @property
    def peak_bytes(self) -> int:
        """Device memory that the run needs, in bytes."""
        return self.best.needed_bytes

    @property
    def host_bytes(self) -> int:
        """Peak host memory per node of the plan's strategy, in bytes."""
        return self.best.host_bytes

    @property
    def step_time_ratio(self) -> float:
        """Step time relative to the baseline, by a roofline model."""
        return self.best.seconds / self.found.plain.seconds

    @property
    def runners_up(self) -> tuple[Measured, ...]:
        """Other configurations that fit, the fastest first."""
        fitting = [one for one in self.found.tried if one.needed_bytes <= self.budget_bytes and one is not self.best]
        return tuple(sorted(fitting, key=lambda measured: measured.seconds))

    def trainer_kwargs(self) -> dict[str, Any]:
        """Return arguments for a Trainer: the user's own, and the features of the plan."""
        return self.best.scheme.trainer_kwargs(self.own)

    def to_yaml(self) -> str:
        """Return a YAML configuration for LightningCLI, to pass as ``--config`` after the user's own."""
        ratio = f"{self.step_time_ratio:.2f}" if self.is_needed else "1"
        on_host = f"{format_bytes(self.host_bytes)} of host memory, " if self.host_bytes else ""
        head = (
            f"# {format_bytes(self.peak_bytes)} of {format_bytes(self.budget_bytes)} on {self.device.name}, {on_host}"
            f"estimated step time {ratio} of baseline.\n"
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
    """Find the features that make a run fit a memory budget with the least overhead.

    Each configuration is traced as :func:`lightning_vram.estimate_memory` does: two steps of ``Trainer.fit`` on fake
    tensors. The search goes from features that cost least to those that cost most.

    Args:
        module: Any LightningModule, with weights or on the ``meta`` device.
        batch: A batch as its loader returns it, of which only shapes and dtypes count. If batches differ, pass the
            largest. ``None``: the first batch of ``datamodule``, or of the module's own loader.
        device: Name of a GPU, such as ``"rtx4090"``; a :class:`lightning_vram.DeviceSpec`; a file of ``lightning-vram
            calibrate``; ``"cpu"`` for a run on this host.
        budget: Device memory that the run may use, in bytes or as ``"24GiB"``, or a share of the device between 0 and
            1. ``None`` or ``"auto"``: all memory of the device.
        host_memory: Host memory of each node for weights or optimizer state of a strategy, in bytes or as
            ``"128GiB"``. Strategies that need more are skipped, and variants that need less are tried. ``None``: no
            limit.
        allow: How the trained weights compare with the baseline. ``"exact"``: bitwise identical. ``"lossless"``: equal
            up to floating-point rounding. ``"any"``: approximate; gradients, moments and frozen weights may differ by a
            bounded error.
        trainer: Arguments of the Trainer. Features of this package among them are kept.
        datamodule: Provides the batch.
        devices: Number of devices per node.
        num_nodes: Number of nodes.
        run_callbacks: Your own callbacks of ``trainer`` that change the module or the step, by class or name.
        on_progress: Called with the current stage as text and the finished share of the work, 0 to 1. ``None`` shows
            both on a terminal.

    Returns:
        The plan. ``print`` shows it as a table, ``plot`` draws it, ``trainer_kwargs`` and ``to_yaml`` apply it.

    Raises:
        PlanError: If no configuration fits. The message names the minimum, and alternatives.
        TypeError: If an argument has a wrong type.
        ValueError: If ``allow`` is unknown, ``budget`` is neither a size above 0 nor a share, or exceeds the device,
            ``host_memory`` is not a size, or for the reasons of ``estimate_memory``.
    """
    check_positive_int("plan_memory(devices)", devices)
    check_positive_int("plan_memory(num_nodes)", num_nodes)
    host_bytes = None if host_memory is None else parse_limit(host_memory, "plan_memory(host_memory)")
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
    workload = Workload(budget_bytes, steps.batch_size, steps.transfer_bytes, host_bytes)
    found = search(steps, workload, remedies)
    if found.best is None:
        here = workload if host_bytes is not None else replace(workload, host_bytes=available_host_bytes())
        ways = suggest_alternatives(steps, found, here, has_strategies=steps.may_choose_strategy)
        raise PlanError(found.least_of(workload), workload, level, ways, steps.device.memory_bytes)
    return MemoryPlan(steps.device, budget_bytes, found, steps.own)


def level_of(name: str, allow: object) -> Exactness:
    """Check ``allow``."""
    if not isinstance(allow, str) or allow not in LEVELS:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, LEVELS))}, got {allow!r}.")
    return LEVELS[allow]


def budget_bytes_of(name: str, budget: int | float | str | None, spec: DeviceSpec) -> int:
    """Check a budget, and return its bytes."""
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


def effects(scheme: Scheme, tried: Sequence[Measured]) -> tuple[str, ...]:
    """Return a sentence for each part: its effect after those before it; empty if not both were traced."""
    steps = [find_measured(Scheme(scheme.parts[:number]), tried) for number in range(len(scheme.parts) + 1)]
    return tuple(_sentence(before, after) for before, after in pairwise(steps))


def _sentence(before: Measured | None, after: Measured | None) -> str:
    if before is None or after is None:
        return ""
    saved_bytes = before.needed_bytes - after.needed_bytes
    change = f"Saves {format_bytes(saved_bytes)}" if saved_bytes >= 0 else f"Needs {format_bytes(-saved_bytes)} more"
    return f"{change}; a step takes {after.seconds / before.seconds:.2f} times as long."
