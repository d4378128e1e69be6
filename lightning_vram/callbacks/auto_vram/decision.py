"""What rank zero decides before the run, and how a plan gets tighter on the way."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback

from lightning_vram.callbacks.auto_vram.parts import differs_late
from lightning_vram.callbacks.auto_vram.words import fits_line, largest_line, miss_message, plan_message, unknown_line
from lightning_vram.estimation.batches import largest_shape
from lightning_vram.estimation.running_trainer.decision import RunningTrainer
from lightning_vram.memory.device.accelerators import has_statistics
from lightning_vram.memory.device.allocator import empty_cache, has_cache
from lightning_vram.memory.estimate.calibrate import measure_bus
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.host.available import available_host_bytes
from lightning_vram.memory.units import parse_bytes
from lightning_vram.planner.measured import Found, Measured, Workload
from lightning_vram.planner.miss import Ways, find_ways
from lightning_vram.planner.parts import Exactness, Part
from lightning_vram.planner.remedies import CHECKPOINTING, may_be_guarded, remedies_for
from lightning_vram.planner.scheme import Scheme
from lightning_vram.planner.search import as_text, search
from lightning_vram.planner.traced_steps import TracedSteps

_ROOM_FOR_ERRORS = 0.03  # of a device, where the user named no budget
_TIGHT = 0.8  # of the budget
_TIGHTER = 0.9


@dataclass(frozen=True)
class Decision:
    """What all ranks do.

    Args:
        message: For the user.
        kind: How to say it: an error ends the run.
        found: By the search; ``None`` if there was none.
        budget_bytes: What there was.
        num_elements: Of the batch that it is for; ``None``: for none.
    """

    message: str
    kind: Literal["info", "warning", "error"] = "info"
    found: Found | None = None
    budget_bytes: int = 0
    num_elements: int | None = None

    @property
    def taken(self) -> Measured | None:
        """What is run; ``None``: nobody knows."""
        return None if self.found is None else self.found.best or self.found.least

    @property
    def is_tight(self) -> bool:
        """Whether the run may yet need more than there is."""
        return self.taken is not None and self.taken.needed_bytes > _TIGHT * self.budget_bytes


def decide(
    read: Callable[[], RunningTrainer], level: Exactness, guards: Sequence[Callback], *, has_budget: bool
) -> Decision:
    """Search for what makes the run fit.

    Args:
        read: Reads the Trainer.
        level: What results may be.
        guards: Callbacks that will stand beside the plan's.
        has_budget: Whether the user named a budget: one that cannot be kept is an error.
    """
    try:
        run = read()
        budget_bytes = run.device.memory_bytes
        if not has_budget:
            budget_bytes = int((1 - _ROOM_FOR_ERRORS) * budget_bytes)
        found, steps, workload = _search(run, budget_bytes, level, guards)
        ways = Ways()
        if found.best is None:
            here = replace(workload, host_bytes=available_host_bytes())
            ways = find_ways(steps, found, here, has_strategies=steps.may_choose_strategy)
    except Exception as error:  # a step on tensors without values may fail where the run does not
        return Decision(unknown_line(f"{type(error).__name__}: {error}", can_run_again=bool(guards)), "warning")
    kind: Literal["info", "error", "warning"] = "info"
    if found.best is None:
        message = miss_message(found, budget_bytes, run.device.name, level, ways, goes_on=not has_budget)
        kind = "error" if has_budget else "warning"
    elif found.best is found.plain:
        message = fits_line(found.plain, budget_bytes, run.device.name)
    else:
        message = plan_message(found, budget_bytes, run.device.name)
    if len(set(run.sizes)) > 1:
        message += f"\n{largest_line(len(run.sizes), largest_shape(run.batch))}"
    return Decision(message, kind, found, budget_bytes, max(run.sizes))


def _search(
    run: RunningTrainer, budget_bytes: int, level: Exactness, guards: Sequence[Callback]
) -> tuple[Found, TracedSteps, Workload]:
    fit, num_devices = run.fit, run.num_devices
    arguments = fit.trainer_arguments
    remedies = remedies_for(arguments, level, on_card=fit.card is not None, module=run.module, has_strategies=False)
    steps = TracedSteps(run.module, run.batch, fit, num_local_ranks=num_devices)
    workload = Workload(budget_bytes, steps.batch_size, steps.travel_bytes)
    plain = steps(Scheme())
    assert plain is not None  # nothing refuses the user's own run
    if plain.needed_bytes <= (_TIGHT if guards else 1) * budget_bytes:  # it runs without guards
        return Found(plain, plain, (plain,)), steps, workload
    if plain.needed_bytes > budget_bytes:  # the bus is not measured for a run that fits
        fit = replace(fit, card=_with_bus(fit.card))
    steps = TracedSteps(run.module, run.batch, fit, num_local_ranks=num_devices, guards=guards)
    workload = replace(workload, travel_bytes=steps.travel_bytes)
    return search(steps, workload, remedies), steps, workload


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
