"""What rank zero decides before the run, and how a plan is tightened during it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lightning_vram.callbacks.auto_vram.applied_plan import can_switch
from lightning_vram.callbacks.auto_vram.plan_cache import load_plan, plan_key, save_plan
from lightning_vram.estimation.batches import largest_shape
from lightning_vram.estimation.estimate import Progress
from lightning_vram.estimation.running_trainer import AUTO, RunningTrainer
from lightning_vram.estimation.traced_fit import reason_of
from lightning_vram.memory.device.accelerators import empty_cache, has_cache, has_statistics
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.estimate.workspaces import measure_bus
from lightning_vram.memory.units import format_argument, format_bytes, parse_bytes
from lightning_vram.planner.plan import MemoryPlan, TracedSteps, describe_minimum
from lightning_vram.planner.remedies import CHECKPOINTING, may_be_guarded
from lightning_vram.planner.scheme import Exactness, Found, Part, Scheme, Workload, find_measured
from lightning_vram.report.plan import TIME, choices, choices_table
from lightning_vram.report.tables import as_text

NAME = "AutoVRAM"


def describe_plan(plan: MemoryPlan) -> str:
    """Report the configuration taken, and the others tried."""
    best, device = plan.best, plan.device.name
    needed, budget = format_bytes(plan.found.plain.needed_bytes), format_bytes(plan.budget_bytes)
    if not plan.is_needed:
        return f"{NAME}: the run fits, nothing is changed. A step needs {needed} of the {budget} on {device}."
    return (
        f"{NAME}: a step needs {needed}, but the budget on {device} is {budget}. With {best.scheme} it needs "
        f"{format_bytes(best.needed_bytes)}, at about {plan.step_time_ratio:.2f} times the step time. Configurations "
        f"tried:\n{as_text(choices_table(choices(plan)))}\n* used for this run. {TIME}"
    )


_MARGIN = 0.03  # of a device, if the user gave no budget
_TIGHT = 0.8  # of the budget
_TIGHTER = 0.9
_LEAST_SECONDS, _SHARE_OF_EPOCH = 30.0, 0.1  # that planning may take, whichever is longer


@dataclass(frozen=True)
class Decision:
    """What all ranks apply."""

    message: str  # for the user; of a fallback: why there is no plan
    # an error ends the run; a fallback checkpoints layers from the first step
    kind: Literal["info", "warning", "error", "fallback"] = "info"
    found: Found | None = None  # by the search; ``None`` if there was none
    budget_bytes: int = 0
    num_elements: int | None = None  # of the batch that was planned; ``None`` without a plan

    @property
    def scheme(self) -> Scheme:
        """The configuration to run."""
        return Scheme() if self.found is None else self.found.taken.scheme

    @property
    def is_tight(self) -> bool:
        """Whether the run may need more than the budget in spite of the plan."""
        return self.found is None or self.found.taken.needed_bytes > _TIGHT * self.budget_bytes


@dataclass(frozen=True)
class PlanRequest:
    """What a plan must respect: exactness, budget as the user typed it, guard callbacks, and the folder of plans."""

    level: Exactness
    budget: int | float | str
    guards: Sequence[Callback] = ()
    folder: Path | None = None  # ``None``: plans are neither read nor written
    on_progress: Progress | None = None

    @property
    def has_budget(self) -> bool:
        """Whether the user gave a budget."""
        return self.budget != AUTO


def decide(asked: PlanRequest, read: Callable[[], RunningTrainer], free_bytes: int | None) -> Decision:
    """Take the plan of an earlier run, or search for a configuration that fits."""
    started, share = monotonic(), 1 if asked.has_budget else 1 - _MARGIN
    budget_bytes = int(share * (free_bytes or 0))
    try:
        run = read()
        decision = _plan(run, budget_bytes, asked, started)
    except Exception as error:  # a step on tensors without values may fail where the run does not
        return _without_plan(reason_of(error), budget_bytes, asked)
    if decision.kind == "fallback":
        return decision
    largest = ""
    if len(set(run.sizes)) > 1:
        largest = f"\nPlanned for the largest of the first {len(run.sizes)} batches, {list(largest_shape(run.batch))}."
    return replace(decision, message=decision.message + largest, num_elements=max(run.sizes))


def _plan(run: RunningTrainer, budget_bytes: int, asked: PlanRequest, started: float) -> Decision:
    fit, begun = run.fit, monotonic()
    steps = TracedSteps(run.module, run.batch, fit, asked.on_progress, num_local_ranks=run.num_devices)
    plain = steps(Scheme())
    assert plain is not None  # the user's own run is never refused
    step_seconds = monotonic() - begun
    if plain.needed_bytes <= (_TIGHT if asked.guards else 1) * budget_bytes:  # it fits without guards
        return _found(run, Found(plain, plain, (plain,)), budget_bytes)
    path = None
    if asked.folder is not None:
        name = plan_key(run, plain, (asked.budget, asked.level.name, bool(asked.guards)))
        path = asked.folder / f"{name}.json"
    known = load_plan(path, budget_bytes)
    if known is not None:
        note = f"\nThe plan was reused from an earlier run, {path}: cache=False makes a new one."
        return _found(run, known, budget_bytes, note)
    if plain.needed_bytes > budget_bytes:  # the bus is not measured for a run that fits
        fit = replace(fit, card=_with_measured_bus(fit.card))
    epoch_seconds = plain.seconds * (run.num_batches or 0) / fit.trainer_arguments["accumulate_grad_batches"]
    most_seconds: float = max(_LEAST_SECONDS, _SHARE_OF_EPOCH * epoch_seconds)
    most = f"{most_seconds:.0f} s, the time limit of planning (a tenth of the first epoch, at least 30 s)"

    def is_late() -> bool:
        return monotonic() - started + step_seconds > most_seconds

    steps = replace(steps, run=fit, guards=asked.guards, is_late=is_late, tried=[])
    found = steps.search(asked.level, budget_bytes, has_strategies=False)
    if found.best is not None:
        save_plan(path, found, budget_bytes)
        late = f"\nIt is the fastest configuration found in {most}." if steps.left_out else ""
        return _found(run, found, budget_bytes, late)
    if steps.left_out:
        return _without_plan(f"no configuration that fits was found in {most}", budget_bytes, asked, found)
    return _nothing_fits(run.device.name, steps, found, budget_bytes, asked)


def _found(run: RunningTrainer, found: Found, budget_bytes: int, note: str = "") -> Decision:
    message = describe_plan(MemoryPlan(run.device, budget_bytes, found)) + note
    return Decision(message, found=found, budget_bytes=budget_bytes)


def _nothing_fits(device: str, steps: TracedSteps, found: Found, budget_bytes: int, asked: PlanRequest) -> Decision:
    device_bytes, may_choose_strategy = None if asked.has_budget else budget_bytes, steps.may_choose_strategy
    minimum = describe_minimum(
        found.least, Workload(budget_bytes), asked.level, device_bytes, may_choose_strategy=may_choose_strategy
    )
    there = format_bytes(budget_bytes)
    message = f"{NAME}: no configuration fits {there} on {device}. {minimum}"
    if asked.has_budget:
        return Decision(message, "error", found, budget_bytes)
    fate = "The run continues with the minimum, and will probably run out of memory."
    return Decision(f"{message} {fate}", "warning", found, budget_bytes)


def _without_plan(reason: str, budget_bytes: int, asked: PlanRequest, found: Found | None = None) -> Decision:
    """Decide without a plan that fits."""
    if asked.has_budget or found is not None:
        return Decision(reason, "fallback", found, budget_bytes)
    later = "; if a step runs out of memory, layers are checkpointed" if asked.guards else ""
    return Decision(f"{NAME} cannot plan this run: {reason}. The run starts unchanged{later}.", "warning")


def _with_measured_bus(spec: DeviceSpec | None) -> DeviceSpec | None:
    """Measure the PCIe bandwidth: a slot may give less than the specification."""
    if spec is None or not has_statistics(torch.device(spec.name).type):
        return spec
    device = torch.device(spec.name)
    try:
        return replace(spec, bus_bytes_per_s=measure_bus(device))
    except torch.OutOfMemoryError:
        return spec
    finally:
        empty_cache(device)


def tighter_scheme(scheme: Scheme, found: Found | None, *, may_checkpoint: bool) -> Scheme | None:
    """Return a scheme that needs less, and that a running fit can switch to; ``None`` if there is none."""
    if found is None:
        return scheme + CHECKPOINTING if may_checkpoint else None
    checkpointing = next((part for part in scheme.parts if part.name == CHECKPOINTING.name), None)
    if checkpointing is not None and "budget" in checkpointing.init_args:
        smaller = _lower_budget(checkpointing, scheme, found)
        return Scheme(tuple(smaller if part is checkpointing else part for part in scheme.parts))
    now = find_measured(scheme, found.tried) or found.least
    less = [
        one for one in found.tried if can_switch(one.scheme, scheme) and one.needed_bytes < _TIGHTER * now.needed_bytes
    ]
    if less:
        return min(less, key=lambda one: one.seconds).scheme
    return scheme + CHECKPOINTING if may_checkpoint else None


def _lower_budget(checkpointing: Part, scheme: Scheme, found: Found) -> Part:
    """Lower the budget of checkpointed layers; save only their inputs, if the budget is close to that."""
    rest = [part for part in scheme.parts if part is not checkpointing]
    lean = find_measured(Scheme((*rest, CHECKPOINTING)), found.tried)
    budget_bytes = int(_TIGHTER * parse_bytes(checkpointing.init_args["budget"]))
    if lean is None or budget_bytes <= lean.activation_bytes:
        return CHECKPOINTING
    return replace(checkpointing, init_args={**checkpointing.init_args, "budget": format_argument(budget_bytes)})


def can_repeat_step(trainer: pl.Trainer) -> bool:
    """Whether a step can be repeated after an OOM: not if ranks wait within it, or some parameters have stepped."""
    is_alone = trainer.world_size == 1 and has_cache(trainer.strategy.root_device)
    names = [type(callback).__name__ for callback in trainer.callbacks]  # type: ignore[attr-defined]
    return is_alone and trainer.lightning_module.automatic_optimization and may_be_guarded(names)
