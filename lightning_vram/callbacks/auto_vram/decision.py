"""What rank zero decides before the run, how a plan is applied, and how it is tightened during the run.

Plans of earlier runs lie in the folder of logs: a run whose step is like that of one of them takes its plan. The name
of a file is a hash of the traced step, memory and time, and of what else decides on a plan. Free memory is not part of
it, since it varies from run to run.
"""

import hashlib
import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_vram.estimation.batches import largest_shape
from lightning_vram.estimation.estimate import Progress
from lightning_vram.estimation.fake_trainer import parts_of
from lightning_vram.estimation.running_trainer import AUTO, RunningTrainer
from lightning_vram.estimation.step_time import StepTime
from lightning_vram.estimation.traced_fit import reason_of
from lightning_vram.memory.device import accelerators
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.estimate.workspaces import measure_bus
from lightning_vram.memory.units import format_argument, parse_bytes
from lightning_vram.planner.plan import MemoryPlan, TracedSteps, describe_minimum
from lightning_vram.planner.scheme import Exactness, Found, Measured, Part, Scheme, Workload, find_measured
from lightning_vram.planner.search import CHECKPOINTING, DDP, may_be_guarded
from lightning_vram.private_names.lightning import ddp_arguments
from lightning_vram.report.plan import plan_table
from lightning_vram.report.tables import as_text
from lightning_vram.version import __version__

NAME = "AutoVRAM"


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
        return _decide(read(), budget_bytes, asked, started)
    except Exception as error:  # a step on tensors without values may fail where the run does not
        reason = reason_of(error)
    if asked.has_budget:
        return Decision(reason, "fallback", None, budget_bytes)
    later = "; if a step runs out of memory, layers are checkpointed" if asked.guards else ""
    return Decision(f"{NAME} cannot plan this run: {reason}. The run starts unchanged{later}.", "warning")


def _decide(run: RunningTrainer, budget_bytes: int, asked: PlanRequest, started: float) -> Decision:
    found, note, steps = _find(run, budget_bytes, asked, started)
    kind: Literal["info", "warning", "error"] = "info"
    if found.best is not None:
        text = as_text(plan_table(MemoryPlan(run.device, budget_bytes, found))) + note
    elif steps.left_out:
        return Decision(f"no configuration that fits was found in {note}", "fallback", found, budget_bytes)
    else:
        device_bytes, may_choose = None if asked.has_budget else budget_bytes, steps.may_choose_strategy
        workload = Workload(budget_bytes)
        text = describe_minimum(found.least, workload, asked.level, device_bytes, may_choose_strategy=may_choose)
        kind = "error" if asked.has_budget else "warning"
    if kind == "warning":
        text += " The run continues with the minimum, and will probably run out of memory."
    if len(set(run.sizes)) > 1:
        text += f"\nPlanned for the largest of the first {len(run.sizes)} batches, {list(largest_shape(run.batch))}."
    return Decision(f"{NAME}: {text}", kind, found, budget_bytes, max(run.sizes))


def _find(run: RunningTrainer, budget_bytes: int, asked: PlanRequest, started: float) -> tuple[Found, str, TracedSteps]:
    """Return the result, a note on it (or the time limit, if nothing was found by then), and what traced the steps."""
    fit, begun = run.fit, monotonic()
    steps = TracedSteps(run.module, run.batch, fit, asked.on_progress, num_local_ranks=run.num_devices)
    plain = steps(Scheme())
    assert plain is not None  # the user's own run is never refused
    step_seconds = monotonic() - begun
    if plain.needed_bytes <= (_TIGHT if asked.guards else 1) * budget_bytes:  # it fits without guards
        return Found(plain, plain, (plain,)), "", steps
    path = None
    if asked.folder is not None:
        path = asked.folder / f"{plan_key(run, plain, (asked.budget, asked.level.name, bool(asked.guards)))}.json"
    known = load_plan(path, budget_bytes)
    if known is not None:
        return known, f"\nThe plan was reused from an earlier run, {path}: cache=False makes a new one.", steps
    if plain.needed_bytes > budget_bytes:  # the bus is not measured for a run that fits
        fit = replace(fit, card=_with_measured_bus(fit.card))
    epoch_seconds = plain.seconds * (run.num_batches or 0) / fit.trainer_arguments["accumulate_grad_batches"]
    most_seconds: float = max(_LEAST_SECONDS, _SHARE_OF_EPOCH * epoch_seconds)
    most = f"{most_seconds:.0f} s, the time limit of planning (a tenth of the first epoch, at least 30 s)"

    def is_late() -> bool:
        return monotonic() - started + step_seconds > most_seconds

    steps = replace(steps, run=fit, guards=asked.guards, is_late=is_late, tried=[])
    found = steps.search(asked.level, budget_bytes, has_strategies=False)
    if found.best is None:
        return found, most, steps
    save_plan(path, found, budget_bytes)
    return found, f"\nIt is the fastest configuration found in {most}." if steps.left_out else "", steps


def _with_measured_bus(spec: DeviceSpec | None) -> DeviceSpec | None:
    """Measure the PCIe bandwidth: a slot may give less than the specification."""
    if spec is None or spec.shares_host_memory or not accelerators.has_statistics(torch.device(spec.name).type):
        return spec
    device = torch.device(spec.name)
    try:
        return replace(spec, bus_bytes_per_s=measure_bus(device))
    except torch.OutOfMemoryError:
        return spec
    finally:
        accelerators.empty_cache(device)


def tighter_scheme(scheme: Scheme, found: Found | None, *, may_checkpoint: bool) -> Scheme | None:
    """Return a scheme that needs less, and that a running fit can switch to; ``None`` if there is none."""
    with_checkpoints = scheme + CHECKPOINTING if may_checkpoint else None
    if found is None:
        return with_checkpoints
    checkpointing = next((part for part in scheme.parts if part.name == CHECKPOINTING.name), None)
    if checkpointing is not None and "budget" in checkpointing.init_args:
        rest = [part for part in scheme.parts if part is not checkpointing]
        lean = find_measured(Scheme((*rest, CHECKPOINTING)), found.tried)
        budget_bytes = int(_TIGHTER * parse_bytes(checkpointing.init_args["budget"]))
        smaller = CHECKPOINTING  # saves only inputs of layers, if the lower budget is close to that
        if lean is not None and budget_bytes > lean.activation_bytes:
            budget = format_argument(budget_bytes)
            smaller = replace(checkpointing, init_args={**checkpointing.init_args, "budget": budget})
        return Scheme(tuple(smaller if part is checkpointing else part for part in scheme.parts))
    most_bytes = _TIGHTER * (find_measured(scheme, found.tried) or found.least).needed_bytes
    less = [one for one in found.tried if can_switch(one.scheme, scheme) and one.needed_bytes < most_bytes]
    return min(less, key=lambda one: one.seconds).scheme if less else with_checkpoints


def can_repeat_step(trainer: pl.Trainer) -> bool:
    """Whether a step can be repeated after an OOM: not if ranks wait within it, or some parameters have stepped."""
    is_alone = trainer.world_size == 1 and accelerators.has_cache(trainer.strategy.root_device)
    names = [type(callback).__name__ for callback in trainer.callbacks]  # type: ignore[attr-defined]
    return is_alone and trainer.lightning_module.automatic_optimization and may_be_guarded(names)


_VIEWS = {"gradient_as_bucket_view": True}
_LATE = ("ActivationCheckpointing", "ActivationOffload")


def _ddp_arguments_of(strategy: Any) -> dict[str, Any] | None:
    """Return a copy of DDP's arguments; ``None``: another strategy."""
    return dict(ddp_arguments(strategy)) if isinstance(strategy, DDPStrategy) else None


class AppliedPlan:
    """Callbacks and plugins of a decision, during a fit.

    Make it in a ``setup`` hook: Lightning's loop over the callbacks reaches those that are appended to the list.
    """

    def __init__(self, trainer: pl.Trainer, decision: Decision, more: Sequence[Callback] = ()) -> None:
        self._trainer = trainer
        self._callbacks: list[tuple[Part | None, Callback]] = [(None, callback) for callback in more]
        self._precision = trainer.strategy.precision_plugin
        self._ddp_arguments = _ddp_arguments_of(trainer.strategy)
        self.decision, self.scheme = decision, decision.scheme
        for part in self.scheme.parts:
            if part.place == "plugins":
                trainer.strategy.precision_plugin = part.make()
            elif part.place == "strategy":  # DDP's, whose arguments are read when it wraps the module
                ddp_arguments(trainer.strategy).update(_VIEWS)  # type: ignore[arg-type]
            else:
                self._callbacks.append((part, part.make()))
        self._list.extend(callback for _, callback in self._callbacks)

    @property
    def _list(self) -> list[Callback]:
        return self._trainer.callbacks  # type: ignore[attr-defined, no-any-return]

    @property
    def may_checkpoint(self) -> bool:
        """Whether neither the user nor the plan checkpoints layers."""
        return CHECKPOINTING.name not in {base.__name__ for one in self._list for base in type(one).__mro__}

    def tighter(self) -> Scheme | None:
        """Return a scheme that needs less; ``None`` if there is none."""
        return tighter_scheme(self.scheme, self.decision.found, may_checkpoint=self.may_checkpoint)

    def change(self, scheme: Scheme) -> bool:
        """Switch to another scheme, between two steps or two tries of one; ``False`` if no layers are for it."""
        trainer, module = self._trainer, self._trainer.lightning_module
        wanted = [part for part in scheme.parts if part.name in _LATE]
        for part, callback in list(self._callbacks):
            if part is not None and part.name in _LATE and part not in wanted:
                callback.teardown(trainer, module, "fit")
                self._list.remove(callback)
                self._callbacks.remove((part, callback))
        known = [part for part, _ in self._callbacks]
        for part in wanted:
            if part not in known:
                callback = part.make()
                try:
                    callback.start_late(trainer)
                except (MisconfigurationException, ValueError):
                    callback.teardown(trainer, module, "fit")
                    return False
                self._callbacks.append((part, callback))
                self._list.append(callback)
        self.scheme = scheme
        return True

    def end(self, exception: BaseException | None = None) -> None:
        """Undo and remove all of them, at the end of a fit or after an error."""
        own, self._callbacks = [callback for _, callback in self._callbacks], []
        self._list[:] = [callback for callback in self._list if all(callback is not one for one in own)]
        self._trainer.strategy.precision_plugin = self._precision
        if self._ddp_arguments is not None:
            ddp_arguments(self._trainer.strategy).clear()  # type: ignore[arg-type]
            ddp_arguments(self._trainer.strategy).update(self._ddp_arguments)  # type: ignore[arg-type]
        for callback in own:
            if exception is None:
                callback.teardown(self._trainer, self._trainer.lightning_module, "fit")
            else:
                callback.on_exception(self._trainer, self._trainer.lightning_module, exception)


def can_switch(one: Scheme, other: Scheme) -> bool:
    """Whether a running fit can switch from one scheme to the other."""
    fixed, other_fixed = ([part for part in scheme.parts if part.name not in _LATE] for scheme in (one, other))
    return fixed == other_fixed


_FIRST_BATCH, _LAST_BATCH = 3, 6  # in the first two, optimizers create their state and callbacks make their plans
_WORTH_A_CHANGE = 0.97
_NO_WAIT = 1.001  # step time by computation: sums of seconds differ in the last digits


class FirstSteps:
    """Measures some batches after the first ones. The host waits for the device twice."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watch = accelerators.PeakWatch(device)
        self._num_batches = 0
        self._started = 0.0

    def begin_batch(self) -> None:
        """Note that a batch begins."""
        if self._num_batches == _FIRST_BATCH:
            self._synchronize()
            self._watch.restart()
            self._started = time.perf_counter()

    def end_batch(self) -> tuple[float, int] | None:
        """Note that a batch has ended; return the seconds of one on average and the peak of reserved bytes, once."""
        self._num_batches += 1
        if self._num_batches != _LAST_BATCH:
            return None
        self._synchronize()
        seconds = (time.perf_counter() - self._started) / (_LAST_BATCH - _FIRST_BATCH)
        return seconds, self._watch.read().peak_reserved_bytes

    def _synchronize(self) -> None:
        torch.accelerator.synchronize(self._device)


def faster_scheme(found: Found, scheme: Scheme, budget_bytes: int, seconds: float) -> Scheme | None:
    """Return a faster scheme by the measured step, that a running fit can switch to; ``None`` if none is."""
    now = find_measured(scheme, found.tried)
    if now is None or now.seconds > _NO_WAIT * now.time.compute:
        return None
    fitting = [
        # Copies keep their time, since PCIe bandwidth was measured.
        replace(one, time=one.time.computed_slower(seconds / now.seconds))
        for one in found.tried
        if one.needed_bytes <= budget_bytes and can_switch(one.scheme, scheme)
    ]
    fastest = min(fitting, key=lambda one: one.seconds, default=now)
    return fastest.scheme if fastest.seconds < _WORTH_A_CHANGE * seconds else None


_OURS = "lightning_vram."
_MORE_BUDGET = 1.1  # times the budget that a plan was made for: with more, a faster plan may fit


def plan_folder(trainer: pl.Trainer) -> Path | None:
    """Return the folder of plans, next to those of runs; ``None`` if it is remote, or the run writes nothing."""
    root = str(next(filter(None, (logger.save_dir for logger in trainer.loggers)), trainer.default_root_dir))
    return None if "://" in root or trainer.fast_dev_run else Path(root) / "auto_vram"  # type: ignore[attr-defined]


def plan_key(run: RunningTrainer, plain: Measured, asked: tuple[Any, ...]) -> str:
    """Hash the traced step, and what else decides on a plan; ``asked`` are the user's arguments."""
    device = torch.device(run.device.name)
    name = getattr(torch.get_device_module(device), "get_device_name", str)(device)
    own = run.fit.trainer_arguments.get("strategy")
    parts = (
        asdict(plain),
        type(own).__name__,
        asked,
        (
            name,
            accelerators.total_bytes(device) if accelerators.can_limit(device) else 0,
            run.fit.num_ranks,
            run.num_devices,
        ),
        sorted((name, str(value)) for name, value in (_ddp_arguments_of(own) or {}).items()),
        [(name, str(one.dtype), one.requires_grad) for name, one in run.module.named_parameters()],
        {
            kind: [type(one).__name__ for one in some]
            for kind, some in parts_of(run.fit.trainer_arguments, run.fit.run_callbacks).items()
        },
        (
            __version__,
            torch.__version__,
            version("lightning"),
            platform.python_version(),
            torch.version.cuda,
            torch.version.hip,
        ),
    )
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


@contextmanager
def _errors_cost_only_cache(path: Path) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        text = str(error).partition("\n")[0]
        rank_zero_info(f"AutoVRAM: cached plans are not used, {path}: {type(error).__name__}: {text}.")


def load_plan(path: Path | None, budget_bytes: int) -> Found | None:
    """Return the plan of an earlier run; ``None`` if there is none for this budget."""
    found = None
    if path is not None and path.is_file():
        with _errors_cost_only_cache(path):
            saved = json.loads(path.read_text(encoding="utf-8"))
            tried = tuple(map(_read_measured, saved["tried"]))
            if tried[saved["best"]].needed_bytes <= budget_bytes <= _MORE_BUDGET * saved["budget_bytes"]:
                found = Found(tried[saved["best"]], tried[saved["plain"]], tried)
    return found


def save_plan(path: Path | None, found: Found, budget_bytes: int) -> None:
    """Write a plan, whole or not at all."""
    if path is None:
        return
    with _errors_cost_only_cache(path):
        places = {"best": found.tried.index(found.taken), "plain": found.tried.index(found.plain)}
        text = json.dumps({"budget_bytes": budget_bytes, **places, "tried": list(map(asdict, found.tried))}, indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(".tmp")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)


def _read_measured(saved: dict[str, Any]) -> Measured:
    scheme = Scheme(tuple(map(_read_part, saved["scheme"]["parts"])))
    return Measured(**{**saved, "scheme": scheme, "time": _read_time(saved["time"])})


def _read_part(saved: dict[str, Any]) -> Part:
    class_path = saved["class_path"]
    if not class_path.startswith(_OURS) and class_path != DDP:  # a file of plans must not run other code
        raise ValueError(f"{class_path!r} is not a class of lightning_vram")
    return Part(**{**saved, "exactness": Exactness(saved["exactness"]), "replaces": tuple(saved["replaces"])})


def _read_time(saved: dict[str, Any]) -> StepTime:
    return StepTime(**{**saved, "backward": saved["backward"] and _read_time(saved["backward"])})
