"""Observe one step, then choose what to recompute so that activations fit a byte budget.

In the observed step every layer is checkpointed. Under the plan some layers run plain, others save results of costly
operators. The budget counts what is saved for backward and what one layer at a time recomputes there: no gradients, no
temporaries inside operators.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed
from torch import nn

from lightning_vram.core.layers import Layer
from lightning_vram.core.tensors.properties import flatten_arguments
from lightning_vram.memory.units import format_bytes
from lightning_vram.techniques.activation_checkpointing.apply import CheckpointingHandle
from lightning_vram.techniques.activation_checkpointing.budget_observer import Shapes, StepObserver, covers, shapes_of
from lightning_vram.techniques.activation_checkpointing.budget_plan import (
    CheckpointPlan,
    StepProfile,
    format_table,
    predict_peak,
)
from lightning_vram.techniques.activation_checkpointing.recomputed_call import DeterminismCheck, Recomputing
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy
from lightning_vram.techniques.activation_checkpointing.saved_arguments import Arguments

_MAX_PROFILES = 8
_MAX_TRIES = 8

Decisions = Mapping[str, frozenset[int] | None]
"""Numbers of the costly operators whose results a layer keeps; ``None``: it runs plain."""


class BudgetedCheckpointing:
    """Makes and applies plans for the layers that a handle checkpoints."""

    def __init__(
        self,
        model: nn.Module,
        handle: CheckpointingHandle,
        budget_bytes: int,
        determinism_check: DeterminismCheck = "outputs",
        min_offload_bytes: int = 0,
    ) -> None:
        self._model = model
        self._handle = handle  # its layers, all of them checkpointed; the caller removes it
        self._budget_bytes = budget_bytes
        self._check: DeterminismCheck = determinism_check
        self._min_offload_bytes = min_offload_bytes
        self._observer: StepObserver | None = None
        self._profiles: list[StepProfile] = []  # of all observed steps
        self._shapes: dict[str, set[Shapes]] = {}  # that calls got in them, and others that are covered; by layer
        self._missing: tuple[str, Shapes] | None = None  # what a layer got that is larger than in any observed step
        self._num_tries = 0  # to observe a step with such inputs

    @property
    def is_outgrown(self) -> bool:
        """Whether inputs have outgrown the plan: all layers run checkpointed, and the next step should be observed."""
        return self._missing is not None

    @property
    def observed_cost(self) -> float:
        """Cost of the costliest forward of the observed step, in FLOP equivalents."""
        profiles = self._observer.profiles() if self._observer is not None else []
        return max((profile.cost for profile in profiles), default=0.0)

    @contextmanager
    def observing(self, inputs: Any = None) -> Iterator[None]:
        """Run one training step inside, with every layer checkpointed; :meth:`plan` works from what it was."""
        self._observer = observer = StepObserver(self._model, inputs, self._min_offload_bytes)
        self._watch_all(observer)
        try:
            with observer.observing():
                yield
        finally:
            self._watch_all(None)

    def plan(self, offload_bytes: int = 0) -> CheckpointPlan | None:
        """Make the cheapest plan that fits, or raise ``BudgetError``; ``None`` if no layer was observed."""
        if self._observer is None:
            return None
        for name, shapes in self._observer.shapes.items():
            self._shapes.setdefault(name, set()).update(shapes)
        observed = self._observer.profiles()
        self._observer = None
        if not observed:
            return None
        # A step with several backwards has several forwards, and batches have several shapes: the plan has to fit all,
        # and is made for the largest, or else for another.
        self._profiles = [*self._profiles, *observed][-_MAX_PROFILES:]
        from lightning_vram.techniques.activation_checkpointing.budget_solver import solve  # NumPy, to plan only

        plans = [solve(profile, self._budget_bytes, offload_bytes) for profile in self._profiles]
        plans.sort(key=lambda plan: plan.plain_peak_bytes, reverse=True)
        fitting = (plan for plan in plans if all(self._fits(plan, profile) for profile in self._profiles))
        return next(fitting, None) or plan_nothing(plans[0], offload_bytes)

    def _fits(self, plan: CheckpointPlan, profile: StepProfile) -> bool:
        decisions = decisions_of(plan)
        choices = [layer.choose(decisions.get(layer.name, frozenset())) for layer in profile.layers]
        return predict_peak(profile, choices, plan.offloaded_bytes) <= self._budget_bytes

    def apply(self, decisions: Decisions, *, is_guarded: bool = True) -> None:
        """Apply decisions from the next call of each layer on; layers without a decision stay checkpointed.

        Where inputs outgrow the plan, guarded layers run checkpointed: not if ranks must recompute the same layers.
        """
        self._num_tries += 1
        if self._missing is not None and (self._covers(*self._missing) or self._num_tries > _MAX_TRIES):
            self._missing = None  # observed by now, or too rare to wait for
        for layer in self._handle.selection.layers:
            full = self._full(layer)
            guard = partial(self._guard, layer.name, full) if is_guarded and layer.name in decisions else None
            self._handle.change(layer, _decide(full, decisions.get(layer.name, frozenset())), guard)

    def _guard(
        self, name: str, full: Recomputing, decided: Recomputing | None, arguments: Arguments
    ) -> Recomputing | None:
        if self._missing is None:
            shapes = shapes_of(flatten_arguments(arguments)[0])
            if not self._covers(name, shapes):
                self._missing, self._num_tries = (name, shapes), 0
        return full if self.is_outgrown else decided

    def _covers(self, name: str, shapes: Shapes) -> bool:
        known = self._shapes[name]
        return shapes in known or any(covers(other, shapes) for other in known)

    def _watch_all(self, observer: StepObserver | None) -> None:
        for layer in self._handle.selection.layers:
            watch = observer.watch(layer.name) if observer is not None else None
            self._handle.change(layer, replace(self._full(layer), watch=watch))

    def _full(self, layer: Layer) -> Recomputing:
        return Recomputing(layer.title, None, self._check)


def plan_nothing(plan: CheckpointPlan, offload_bytes: int = 0) -> CheckpointPlan:
    """Return a plan like this one in which all layers are checkpointed and nothing is kept."""
    choices = tuple(layer.choose(frozenset()) for layer in plan.profile.layers)
    peak_bytes, offloaded_bytes = min((predict_peak(plan.profile, choices, away), away) for away in {0, offload_bytes})
    return replace(plan, choices=choices, peak_bytes=peak_bytes, offloaded_bytes=offloaded_bytes)


def decisions_of(plan: CheckpointPlan) -> Decisions:
    """Return what a plan decides, by layer."""
    return {choice.name: choice.decision for choice in plan.choices}


def _decide(full: Recomputing, kept: frozenset[int] | None) -> Recomputing | None:
    if kept is None:
        return None
    return replace(full, save=SavePolicy("matmuls", numbers=kept)) if kept else full


@dataclass(frozen=True)
class SharedPlan:
    """The part of a plan that ranks exchange."""

    decisions: Decisions
    plain_peak_bytes: int  # what the rank would need without a plan
    table: str  # for the user
    summary: str
    offloaded_bytes: int = 0  # of a forward, to be away
    largest_bytes: int = 0  # the largest storage among them: that much more may travel, for what travels is not cut


def share_largest(make_plan: Callable[[], CheckpointPlan | None]) -> SharedPlan | None:
    """Make a plan on every rank, and return that of the rank which needs most; ``None`` if none could be made.

    A collective, where there are several ranks. Layers may communicate while they run (SyncBatchNorm, FSDP), so all
    ranks must recompute the same ones, and all of them must raise an error that one has.
    """
    found = _make(make_plan)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        everybodys: list[SharedPlan | str | None] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everybodys, found)
    else:
        everybodys = [found]
    errors = [plan for plan in everybodys if isinstance(plan, str)]
    if errors:
        raise ValueError(errors[0])
    plans = [plan for plan in everybodys if isinstance(plan, SharedPlan)]
    return max(plans, key=lambda plan: plan.plain_peak_bytes) if plans else None


def _make(make_plan: Callable[[], CheckpointPlan | None]) -> SharedPlan | str | None:
    try:
        plan = make_plan()
    except ValueError as error:
        return str(error)
    if plan is None:
        return None
    peak = format_bytes(plan.peak_bytes)
    summary = f"{peak} of activations, {plan.recompute_share:.0%} of the forward is recomputed."
    sizes = plan.offloaded_bytes, plan.profile.largest_bytes
    return SharedPlan(decisions_of(plan), plan.plain_peak_bytes, format_table(plan), summary, *sizes)
