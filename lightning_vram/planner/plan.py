"""Plans: trace configurations on fake tensors, and return the fastest that fits with its cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lightning_vram.argument_checks import check_choice, check_positive_int
from lightning_vram.core.host.memory import margin_bytes
from lightning_vram.estimation.batches import batch_size_of, first_batch
from lightning_vram.estimation.estimate import Progress, needed_bytes, spec_of
from lightning_vram.estimation.fake_trainer import RunCallbacks, check_run_callbacks
from lightning_vram.estimation.running_trainer import AUTO, check_limit
from lightning_vram.estimation.step_time import bus_bytes_per_s
from lightning_vram.estimation.traced_fit import STEP, FitRun, trace_fit
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.estimate.workspaces import workspaces_of
from lightning_vram.memory.tracking.timeline import Category
from lightning_vram.memory.units import KIB, format_argument, format_bytes, parse_bytes, parse_limit
from lightning_vram.planner import scheme as schemes
from lightning_vram.planner.search import (
    bucket_views,
    has_plain_strategy,
    may_be_guarded,
    mode_of,
    remedies_for,
    search,
)

HOST = "cpu"
# Samples of results and generator states, which features store only in real runs.
_UNSEEN_BYTES, _UNSEEN_SHARE = 64 * KIB, 0.001
_FORWARD_SHARE = 0.3  # of a step: the rest is backward and optimizer
_STATES = (Category.PARAMETERS, Category.GRADIENTS, Category.OPTIMIZER_STATE)


@dataclass
class TracedSteps:
    """Traces steps of schemes on fake tensors, each once; once ``is_late()``, only the baseline."""

    module: pl.LightningModule
    batch: Any
    run: FitRun
    on_progress: Progress | None = None
    num_local_ranks: int = 1
    guards: Sequence[Callback] = ()  # repeat a step after OOM; added if all parts allow it
    is_late: Callable[[], bool] = lambda: False
    tried: list[schemes.Measured] = field(default_factory=list)  # in order
    left_out: list[schemes.Scheme] = field(default_factory=list)  # were too late

    @property
    def may_choose_strategy(self) -> bool:
        """Whether a strategy may offload weights and states: on a GPU, with the default strategy."""
        return self._may_offload and has_plain_strategy(self.run.trainer_arguments)

    @property
    def _may_offload(self) -> bool:
        """Whether the host has memory that the device has not."""
        return self.run.card is not None and not self.run.card.shares_host_memory

    def search(
        self, level: schemes.Exactness, budget_bytes: int, *, host_bytes: int | None = None, has_strategies: bool = True
    ) -> schemes.Found:
        """Find the fastest scheme that fits: the one place that answers what would make a run fit."""
        own, card = self.run.trainer_arguments, self.run.card
        limits = {"has_strategies": has_strategies, "knows_host": host_bytes is not None}
        remedies = remedies_for(own, level, may_offload=self._may_offload, module=self.module, **limits)
        views = [part for part in bucket_views(own, self.run.num_ranks) if part.exactness <= level]
        remedies = replace(remedies, free=tuple(sorted((*remedies.free, *views), key=lambda part: part.exactness)))
        transfer_bytes_per_s = 0.0 if card is None else bus_bytes_per_s(card) * _FORWARD_SHARE
        workload = schemes.Workload(budget_bytes, batch_size_of(self.batch) or 0, transfer_bytes_per_s, host_bytes)
        return search(self, workload, remedies)

    def __call__(self, scheme: schemes.Scheme) -> schemes.Measured | None:
        """Trace one; ``None`` if a feature refuses this run, or it is late."""
        known = schemes.find_measured(scheme, self.tried)
        if known is not None:
            return known
        if scheme.parts and self.is_late():
            self.left_out += [] if scheme in self.left_out else [scheme]
            return None
        if self.on_progress is not None:
            self.on_progress(f"tracing {scheme}", 1 - 0.9 ** len(self.tried))
        try:
            own = dict(self.run.trainer_arguments)
            if self.guards and may_be_guarded(part.name for part in scheme.parts):
                own["callbacks"] = [*own["callbacks"], *self.guards]
            traced = trace_fit(self.module, self.batch, replace(self.run, trainer_arguments=scheme.trainer_kwargs(own)))
        except Exception:
            if not scheme.parts:  # the user's own run
                raise
            return None
        timeline = traced.timeline
        held = next(((name, size) for name, size in timeline.peak_by_module.items() if name), None)
        largest = "" if held is None else f", mostly for '{held[0]}' ({format_bytes(held[1])})"
        phase = timeline.peak_phase
        num_bytes = needed_bytes(traced, None if self.run.card is None else workspaces_of(self.run.card))
        measured = schemes.Measured(
            scheme,
            num_bytes + (_UNSEEN_BYTES + int(_UNSEEN_SHARE * num_bytes) if scheme.parts else 0),
            traced.stage(STEP).peak_of(Category.ACTIVATIONS),
            traced.times[STEP],
            sum(timeline.peak_by_category[category] for category in _STATES),
            "" if phase is None else f", in the {phase.replace('_', ' ')}{largest}",
            traced.layers,
            traced.host_bytes * self.num_local_ranks,
        )
        self.tried.append(measured)
        return measured


SMALLER_BATCH = "a smaller batch with accumulate_grad_batches"


def describe_minimum(
    least: schemes.Measured,
    workload: schemes.Workload,
    level: schemes.Exactness,
    device_bytes: int | None,
    *,
    may_choose_strategy: bool,
) -> str:
    """Say that nothing fits, the minimum of the search, and what helps: a larger budget only on a larger device.

    ``device_bytes`` is ``None`` where the device has more than the budget, as far as is known.
    """
    num_bytes, budget_bytes = least.needed_bytes, workload.budget_bytes
    if num_bytes <= budget_bytes:  # only the host is too small
        needed, limit = least.host_bytes, f"{format_bytes(workload.host_bytes or 0)} of host memory"
        place = f", in addition to {format_bytes(margin_bytes(needed))} that must stay free"
        helps = [
            f"host_memory='{format_argument(schemes.with_margin(needed), round_up=True)}'",
            "FSDPOffloadStrategy(nvme_path='/a/fast/disk'), which keeps optimizer state on disk",
        ]
    else:
        needed, limit, place = num_bytes, format_bytes(budget_bytes), least.peak
        is_too_small = device_bytes is not None and num_bytes > device_bytes
        budget = f"budget='{format_argument(num_bytes, round_up=True)}'"
        helps = [f"a device with {format_bytes(num_bytes)}" if is_too_small else budget]
        if may_choose_strategy and mode_of(least.scheme) is None and num_bytes - least.states_bytes < budget_bytes:
            helps.append("strategy='fsdp_offload'")
        if num_bytes - least.activation_bytes <= budget_bytes:
            helps.append(SMALLER_BATCH)
    names = [repr(name) for name, other in schemes.LEVELS.items() if other > level]
    helps += [f"perhaps allow={' or '.join(names)}"] if names else []
    text = f"{', '.join(helps[:-1])}, or {helps[-1]}" if len(helps) > 1 else helps[0]
    minimum = f"The minimum found is {format_bytes(needed)}, with {least.scheme}{place}."
    return f"No plan fits {limit}. {minimum} What helps: {text}."


class PlanError(ValueError):
    """No configuration fits the budget. The message names the minimum, and what would help.

    Args:
        message: The message.
        least: The configuration that comes nearest.
    """

    def __init__(self, message: str, least: schemes.Measured) -> None:
        super().__init__(message)
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
    found: schemes.Found
    own: Mapping[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> schemes.Measured:
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
        return head + self.best.scheme.to_yaml()


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
    check_choice("plan_memory(allow)", allow, schemes.LEVELS)
    level = schemes.LEVELS[allow]
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
    found = steps.search(level, budget_bytes, host_bytes=host_bytes)
    if found.best is None:
        workload = schemes.Workload(budget_bytes, host_bytes=host_bytes)
        least = found.least_of(workload)
        may_choose = steps.may_choose_strategy
        message = describe_minimum(least, workload, level, spec.memory_bytes, may_choose_strategy=may_choose)
        raise PlanError(message, least)
    return MemoryPlan(spec, budget_bytes, found, own)


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
