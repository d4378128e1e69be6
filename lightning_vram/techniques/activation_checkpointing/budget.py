"""Observe one step, then choose what to recompute so that activations fit a byte budget.

In the observed step every layer is checkpointed. Under the plan some layers run plain, others save results of costly
operators. The budget counts what is saved for backward and what one layer at a time recomputes there: no gradients, no
temporaries inside operators.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from lightning_vram.core.layers import Layer
from lightning_vram.core.ranks import gather_objects
from lightning_vram.core.tensors.properties import flatten_arguments
from lightning_vram.techniques.activation_checkpointing.apply import CheckpointingHandle
from lightning_vram.techniques.activation_checkpointing.budget_observer import Shapes, StepObserver, covers, shapes_of
from lightning_vram.techniques.activation_checkpointing.budget_plan import (
    NOTHING,
    CheckpointPlan,
    Decisions,
    StepProfile,
    predict_peak,
)
from lightning_vram.techniques.activation_checkpointing.recomputed_call import DeterminismCheck, Recomputing
from lightning_vram.techniques.activation_checkpointing.save_policy import SavePolicy
from lightning_vram.techniques.activation_checkpointing.saved_arguments import Arguments

_MAX_PROFILES = 8
_MAX_TRIES = 8


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
        self.budget_bytes = budget_bytes
        self.profiles: deque[StepProfile] = deque(maxlen=_MAX_PROFILES)
        """Of the rounds observed last."""
        self._model = model
        self._handle = handle  # its layers, all of them checkpointed; the caller removes it
        self._check: DeterminismCheck = determinism_check
        self._min_offload_bytes = min_offload_bytes
        self._shapes: dict[str, set[Shapes]] = {}  # that calls got in observed steps, by layer
        self._missing: tuple[str, Shapes] | None = None  # what a layer got that is larger than in any observed step
        self._num_tries = 0  # to observe a step with such inputs

    @property
    def is_outgrown(self) -> bool:
        """Whether inputs have outgrown the plan: all layers run checkpointed, and the next step should be observed."""
        return self._missing is not None

    @contextmanager
    def observing(self, inputs: Any = None) -> Iterator[None]:
        """Run one training step inside, with every layer checkpointed; :meth:`plan` works from what it was."""
        observer = StepObserver(self._model, inputs, self._min_offload_bytes)
        for layer in self._handle.selection.layers:
            self._handle.change(layer, replace(self._full(layer), watch=observer.watch(layer.name)))
        try:
            with observer.observing():
                yield
            self.profiles += observer.profiles()
            for name, shapes in observer.shapes.items():
                self._shapes.setdefault(name, set()).update(shapes)
        finally:
            for layer in self._handle.selection.layers:
                self._handle.change(layer, self._full(layer))

    def plan(self, offload_bytes: int = 0) -> CheckpointPlan | None:
        """Make a plan for the largest round, or raise ``BudgetError``; ``None`` if no layer was observed.

        A step with several backwards has several rounds, and batches have several shapes: if one of the others does
        not fit the plan, every layer is checkpointed.
        """
        if not self.profiles:
            return None
        from lightning_vram.techniques.activation_checkpointing import budget_solver  # NumPy, to plan only

        for profile in self.profiles:
            budget_solver.find_minimum(profile, self.budget_bytes, offload_bytes)
        largest = max(self.profiles, key=lambda profile: predict_peak(profile, profile.decide(None)))
        plan = budget_solver.solve(largest, self.budget_bytes, offload_bytes)
        peaks = (predict_peak(profile, plan.decisions, plan.offloaded_bytes) for profile in self.profiles)
        if max(peaks) <= self.budget_bytes:
            return plan
        return budget_solver.plan_nothing(largest, self.budget_bytes, offload_bytes)

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
            decision = decisions.get(layer.name, NOTHING)
            decided = replace(full, save=SavePolicy("matmuls", numbers=decision)) if decision else full
            self._handle.change(layer, None if decision is None else decided, guard)

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

    def _full(self, layer: Layer) -> Recomputing:
        return Recomputing(layer.title, None, self._check)


def share_largest(make_plan: Callable[[], CheckpointPlan | None]) -> CheckpointPlan | None:
    """Make a plan on every rank, and return that of the rank which needs most; ``None`` if none could be made.

    A collective, where there are several ranks. Layers may communicate while they run (SyncBatchNorm, FSDP), so all
    ranks must recompute the same ones, and all of them must raise an error that one has.
    """
    found: CheckpointPlan | str | None
    try:
        found = make_plan()
    except ValueError as error:
        found = str(error)
    everybodys = gather_objects(found)
    for plan in everybodys:
        if isinstance(plan, str):
            raise ValueError(plan)
    plans = [plan for plan in everybodys if isinstance(plan, CheckpointPlan)]
    return max(plans, key=lambda plan: plan.plain_peak_bytes, default=None)
