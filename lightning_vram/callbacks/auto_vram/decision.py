"""What rank zero decides before the run, and how a plan gets tighter on the way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.nn.parameter import is_lazy

from lightning_vram.callbacks.auto_vram.parts import differs_late
from lightning_vram.callbacks.auto_vram.plan_cache import load_plan, plan_key, save_plan
from lightning_vram.callbacks.auto_vram.words import (
    cached_line,
    cut_line,
    found_message,
    largest_line,
    late_reason,
    miss_message,
    reason_of,
    unknown_line,
    unread_line,
    weights_message,
)
from lightning_vram.estimation.batches import largest_shape
from lightning_vram.estimation.estimate import Progress
from lightning_vram.estimation.running_trainer.decision import RunningTrainer
from lightning_vram.estimation.running_trainer.limit import AUTO
from lightning_vram.memory.device.accelerators import has_statistics
from lightning_vram.memory.device.allocator import empty_cache, has_cache
from lightning_vram.memory.estimate.calibrate import measure_bus
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.host.available import available_host_bytes
from lightning_vram.memory.units import parse_bytes
from lightning_vram.planner.measured import Found, Workload
from lightning_vram.planner.miss import find_ways
from lightning_vram.planner.parts import Exactness, Part
from lightning_vram.planner.remedies import CHECKPOINTING, QUANTIZED, may_be_guarded, remedies_for
from lightning_vram.planner.scheme import Scheme
from lightning_vram.planner.search import as_text, search
from lightning_vram.planner.traced_steps import TracedSteps

_ROOM_FOR_ERRORS = 0.03  # of a device, where the user named no budget
_TIGHT = 0.8  # of the budget
_TIGHTER = 0.9
_LEAST_SECONDS, _SHARE_OF_EPOCH = 30.0, 0.1  # that planning may take, whichever is longer
_MORE_AT_REST = 3  # gradients and two moments, by weights


@dataclass(frozen=True)
class Decision:
    """What all ranks do.

    Args:
        message: For the user; of a fallback: why there is no plan.
        kind: How to say it. An error ends the run; a fallback checkpoints layers from the first step.
        found: By the search; ``None`` if there was none.
        budget_bytes: What there was.
        num_elements: Of the batch that it is for; ``None``: for none.
        is_known: Whether an earlier run has found it.
    """

    message: str
    kind: Literal["info", "warning", "error", "fallback"] = "info"
    found: Found | None = None
    budget_bytes: int = 0
    num_elements: int | None = None
    is_known: bool = False

    @property
    def scheme(self) -> Scheme:
        """What is run."""
        return Scheme() if self.found is None else self.found.taken.scheme

    @property
    def is_tight(self) -> bool:
        """Whether the run may yet need more than there is."""
        return self.found is None or self.found.taken.needed_bytes > _TIGHT * self.budget_bytes


@dataclass(frozen=True)
class Asked:
    """What is asked of a plan.

    Args:
        level: What results may be.
        budget: As the user named it. With ``"auto"`` it is no error if nothing fits.
        guards: Callbacks that will stand beside the plan's.
        folder: Of the plans of earlier runs; ``None``: they are neither read nor written.
        on_progress: Is told what is being done.
    """

    level: Exactness
    budget: int | float | str
    guards: Sequence[Callback] = ()
    folder: Path | None = None
    on_progress: Progress | None = None

    @property
    def has_budget(self) -> bool:
        """Whether the user named one."""
        return self.budget != AUTO


def decide(trainer: pl.Trainer, read: Callable[[], RunningTrainer], room_bytes: int | None, asked: Asked) -> Decision:
    """Take the plan of an earlier run, or search for what makes this one fit.

    Args:
        trainer: That is in its ``setup`` hooks.
        read: Reads it, and its first batches.
        room_bytes: What there is of the device; ``None``: nobody knows.
        asked: Of the plan.
    """
    started, share = monotonic(), 1 if asked.has_budget else 1 - _ROOM_FOR_ERRORS
    budget_bytes = int(share * (room_bytes or 0))
    try:
        run = read()
        path = _path_of(run, asked)
        decision = _recall(path, run, budget_bytes) or _plan(trainer, run, budget_bytes, asked, started)
    except Exception as error:  # a step on tensors without values may fail where the run does not
        return _without_plan(trainer, reason_of(error), budget_bytes, asked)
    if decision.kind == "fallback":
        return decision
    _keep(path, decision)
    if len(set(run.sizes)) > 1:
        largest = largest_line(len(run.sizes), largest_shape(run.batch))
        decision = replace(decision, message=f"{decision.message}\n{largest}")
    return replace(decision, num_elements=max(run.sizes))


def _path_of(run: RunningTrainer, asked: Asked) -> Path | None:
    if asked.folder is None:
        return None
    try:
        return asked.folder / f"{plan_key(run, (asked.budget, asked.level.name, bool(asked.guards)))}.json"
    except Exception as error:  # what a module of the user's has may raise anything when it is read
        rank_zero_info(unread_line(asked.folder, error))
        return None


def _recall(path: Path | None, run: RunningTrainer, budget_bytes: int) -> Decision | None:
    try:
        found = None if path is None else load_plan(path, budget_bytes)
    except ValueError as error:
        rank_zero_info(unread_line(path, error))
        return None
    if found is None:
        return None
    message = f"{found_message(found, budget_bytes, run.device.name)}\n{cached_line(path)}"
    return Decision(message, found=found, budget_bytes=budget_bytes, is_known=True)


def _keep(path: Path | None, decision: Decision) -> None:
    """Write a plan for later runs."""
    if path is None or decision.found is None or decision.kind != "info" or decision.is_known:
        return
    try:
        save_plan(path, decision.found, decision.budget_bytes)
    except OSError as error:
        rank_zero_info(unread_line(path, error))


def _plan(trainer: pl.Trainer, run: RunningTrainer, budget_bytes: int, asked: Asked, started: float) -> Decision:
    found, steps, workload, most_seconds = _search(run, budget_bytes, asked, started)
    if found.best is not None:
        message = found_message(found, budget_bytes, run.device.name)
        if steps.is_cut:
            message += f"\n{cut_line(most_seconds)}"
        return Decision(message, found=found, budget_bytes=budget_bytes)
    if steps.is_cut:
        return _without_plan(trainer, late_reason(most_seconds), budget_bytes, asked, found)
    here = replace(workload, host_bytes=available_host_bytes())
    ways = find_ways(steps, found, here, has_strategies=steps.may_choose_strategy)
    message = miss_message(found, budget_bytes, run.device.name, asked.level, ways, goes_on=not asked.has_budget)
    return Decision(message, "error" if asked.has_budget else "warning", found, budget_bytes)


def _search(
    run: RunningTrainer, budget_bytes: int, asked: Asked, started: float
) -> tuple[Found, TracedSteps, Workload, float]:
    """Return what was found, what is needed to search on, and how many seconds planning may take."""
    fit, num_devices, guards = run.fit, run.num_devices, asked.guards
    own, on_card, begun = fit.trainer_arguments, fit.card is not None, monotonic()
    remedies = remedies_for(own, asked.level, on_card=on_card, module=run.module, has_strategies=False)
    steps = TracedSteps(run.module, run.batch, fit, asked.on_progress, num_local_ranks=num_devices)
    workload = Workload(budget_bytes, steps.batch_size, steps.travel_bytes)
    plain = steps(Scheme())
    assert plain is not None  # nothing refuses the user's own run
    step_seconds = monotonic() - begun
    epoch_seconds = plain.seconds * (run.num_batches or 0) / own["accumulate_grad_batches"]
    most_seconds: float = max(_LEAST_SECONDS, _SHARE_OF_EPOCH * epoch_seconds)
    if plain.needed_bytes <= (_TIGHT if guards else 1) * budget_bytes:  # it runs without guards
        return Found(plain, plain, (plain,)), steps, workload, most_seconds
    if plain.needed_bytes > budget_bytes:  # the bus is not measured for a run that fits
        fit = replace(fit, card=_with_bus(fit.card))

    def is_late() -> bool:
        return monotonic() - started + step_seconds > most_seconds

    steps = TracedSteps(
        run.module, run.batch, fit, asked.on_progress, num_local_ranks=num_devices, guards=guards, is_late=is_late
    )
    workload = replace(workload, travel_bytes=steps.travel_bytes)
    return search(steps, workload, remedies), steps, workload, most_seconds


def _without_plan(
    trainer: pl.Trainer, reason: str, budget_bytes: int, asked: Asked, found: Found | None = None
) -> Decision:
    """Decide by what is known without a trace."""
    weights_bytes, rest_bytes = _bytes_at_rest(trainer)
    if asked.has_budget and 0 < budget_bytes < weights_bytes:
        return Decision(weights_message(reason, weights_bytes, budget_bytes), "error")
    if asked.has_budget or found is not None or 0 < budget_bytes < rest_bytes:
        return Decision(reason, "fallback", found, budget_bytes)
    return Decision(unknown_line(reason, can_run_again=bool(asked.guards)), "warning")


def _bytes_at_rest(trainer: pl.Trainer) -> tuple[int, int]:
    """Return bytes of weights, and with gradients and two moments of what is trained; 0: nobody knows."""
    widths = {Precision: 8, MixedPrecision: 8, DoublePrecision: 8, HalfPrecision: 2}
    most = widths.get(type(trainer.precision_plugin))
    if most is None or not isinstance(trainer.strategy, SingleDeviceStrategy | DDPStrategy):
        return 0, 0  # others have weights elsewhere, or in fewer bits
    names = {type(callback).__name__ for callback in trainer.callbacks}  # type: ignore[attr-defined]
    parameters = [one for one in trainer.lightning_module.parameters() if not is_lazy(one)]  # type: ignore[redundant-expr]
    frozen, trained = (
        sum(one.numel() * min(most, one.element_size()) for one in parameters if one.requires_grad is is_trained)
        for is_trained in (False, True)
    )
    weights_bytes = trained + (0 if QUANTIZED[0].name in names else frozen)
    return weights_bytes, weights_bytes + _MORE_AT_REST * trained


def _with_bus(spec: DeviceSpec | None) -> DeviceSpec | None:
    """What makers tell of a bus is not what a slot gives."""
    if spec is None or not has_statistics(torch.device(spec.name).type):
        return spec
    device = torch.device(spec.name)
    try:
        return replace(spec, bus_bytes_per_s=measure_bus(device))
    except torch.OutOfMemoryError:
        return spec
    finally:
        empty_cache(device)


def tighter(scheme: Scheme, found: Found | None, *, may_checkpoint: bool) -> Scheme | None:
    """Return a scheme that needs less, and that a run can go on with; ``None`` if there is none.

    Args:
        scheme: What is run.
        found: By the search; ``None`` if there was none.
        may_checkpoint: Whether layers may be checkpointed that are not yet.
    """
    if found is None:
        return scheme + CHECKPOINTING if may_checkpoint else None
    checkpointing = next((part for part in scheme.parts if part.name == CHECKPOINTING.name), None)
    if checkpointing is not None and "budget" in checkpointing.init_args:
        smaller = _smaller(checkpointing, scheme, found)
        return Scheme(tuple(smaller if part is checkpointing else part for part in scheme.parts))
    others = [one for one in found.tried if differs_late(one.scheme, scheme)]
    now = next((one.needed_bytes for one in others if one.scheme == scheme), found.least.needed_bytes)
    less = [one for one in others if one.needed_bytes < _TIGHTER * now]
    if less:
        return min(less, key=lambda one: one.seconds).scheme
    return scheme + CHECKPOINTING if may_checkpoint else None


def _smaller(checkpointing: Part, scheme: Scheme, found: Found) -> Part:
    """Let layers keep less; nothing at all, if they keep little."""
    rest = [part for part in scheme.parts if part is not checkpointing]
    lean = next((one for one in found.tried if one.scheme == Scheme((*rest, CHECKPOINTING))), None)
    budget_bytes = int(_TIGHTER * parse_bytes(checkpointing.init_args["budget"]))
    if lean is None or budget_bytes <= lean.activation_bytes:
        return CHECKPOINTING
    return replace(checkpointing, init_args={**checkpointing.init_args, "budget": as_text(budget_bytes)})


def can_run_again(trainer: pl.Trainer) -> bool:
    """Whether a step that ran out of memory can run again.

    Not where ranks wait in the middle of it, nor where some parameters have stepped by then.
    """
    is_alone = trainer.world_size == 1 and has_cache(trainer.strategy.root_device)
    names = [type(callback).__name__ for callback in trainer.callbacks]  # type: ignore[attr-defined]
    return is_alone and trainer.lightning_module.automatic_optimization and may_be_guarded(names)
