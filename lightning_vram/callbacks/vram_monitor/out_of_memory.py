"""The report about an out-of-memory error: facts of the run, and which features would have helped."""

import linecache
import sys
import sysconfig
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from time import monotonic
from types import FrameType, TracebackType
from typing import Any, Self

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor, nn

from lightning_vram.callbacks.hook_points import FitTechnique
from lightning_vram.estimation.estimate import Progress, estimate_stages
from lightning_vram.estimation.running_trainer import describe_device, read_trainer_arguments
from lightning_vram.estimation.traced_fit import STEP, FitRun, trace_fit
from lightning_vram.memory.device.accelerators import empty_cache, has_cache, read_allocator
from lightning_vram.memory.device.out_of_memory import (
    FailedRequest,
    OutOfMemorySource,
    path_to_out_of_memory,
    read_failed_request,
    write_snapshot,
)
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.estimate.result import TRAIN, MemoryEstimate
from lightning_vram.memory.estimate.workspaces import workspaces_of
from lightning_vram.memory.tracking.timeline import Category, MemoryTimeline
from lightning_vram.memory.tracking.tracker import track_memory
from lightning_vram.memory.units import format_bytes
from lightning_vram.planner.oom_remedies import (
    LeanerEvaluation,
    as_code,
    measure_evaluation,
    measure_singles,
    results_of,
)
from lightning_vram.planner.plan import TracedSteps
from lightning_vram.planner.remedies import remedies_for
from lightning_vram.planner.scheme import Exactness, Measured
from lightning_vram.private_names.torch import tensors_in
from lightning_vram.report.estimate import picture
from lightning_vram.report.out_of_memory import OutOfMemory, Place, Remedy, Work, summary, write_page
from lightning_vram.report.progress import ProgressDisplay

_STAGES = ("train", "validation", "test", "predict")
_BY_FUNCTION = {
    **dict.fromkeys(("training_step", "validation_step", "test_step", "predict_step"), Work.FORWARD),
    **dict.fromkeys((f"on_{stage}_{end}" for stage in _STAGES for end in ("epoch_end", "end")), Work.EPOCH_END),
    "on_run_end": Work.EPOCH_END,  # where Lightning computes the metrics that are logged
    "model_to_device": Work.MOVING,
    **dict.fromkeys(("save_checkpoint", "dump_checkpoint"), Work.SAVING),
    **dict.fromkeys(
        ("restore", "resume_start", "restore_training_state", "restore_optimizers", "load_checkpoint"), Work.RESTORING
    ),
}
_MOST_CHARACTERS_OF_LINE = 100
_IN_BACKWARD = {"backward", "_engine_run_backward"}
_OWN_FOLDER = str(Path(__file__).parents[2])
_LIBRARIES = tuple({sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def read_place(errors: Sequence[BaseException], module: nn.Module) -> Place:
    """Find out what was being done when memory ran out; ``errors`` from the outermost to the out-of-memory error."""
    names = {id(part): name for name, part in module.named_modules()}
    work, inner, line, function = Work.OTHER, "", "", ""
    for frame, number in chain.from_iterable(traceback.walk_tb(error.__traceback__) for error in errors):
        work = _work_of(frame) or work
        inner = names.get(id(frame.f_locals.get("self")), "") or inner
        path = frame.f_code.co_filename
        if path.endswith("nn/functional.py"):
            function = frame.f_code.co_name
        if _is_users(path):
            line = f"{Path(path).name}:{number}: {linecache.getline(path, number).strip():.{_MOST_CHARACTERS_OF_LINE}}"
    return Place(work, "" if work in (Work.RESTORING, Work.SAVING, Work.MOVING) else inner, line, function)


def _work_of(frame: FrameType) -> Work | None:
    path, name = frame.f_code.co_filename.replace("\\", "/"), frame.f_code.co_name
    if "/torch/optim/" in path or "/lightning_vram/optimizers/" in path:
        return Work.OPTIMIZER_STEP
    if name in _IN_BACKWARD and ("/torch/autograd/" in path or path.endswith("/torch/_tensor.py")):
        return Work.BACKWARD
    return _BY_FUNCTION.get(name)


def _is_users(path: str) -> bool:
    is_file = not path.startswith("<") and path != sys.executable
    return is_file and not path.startswith((_OWN_FOLDER, *_LIBRARIES)) and "site-packages" not in path


_NUM_ENDS = 64


class LastBatches:
    """The running batch of one run, and the ends of the last ones."""

    def __init__(self) -> None:
        self.stage = "train"
        self.batch: Any = None  # that is running
        self.batch_idx = 0
        self.timeline: MemoryTimeline | None = None  # of what was tracked in a batch that has ended in an error
        self._ends: dict[str, deque[tuple[int, int]]] = {}

    @property
    def ends(self) -> deque[tuple[int, int]]:
        """Batches of this stage so far, and bytes in tensors at their ends: each evaluation counts for itself."""
        return self._ends.setdefault(self.stage, deque(maxlen=_NUM_ENDS))

    def switch_stage(self, stage: str) -> None:
        """Record what runs now. Training continues where it was."""
        self.stage = stage
        if stage != "train":
            self._ends.pop(stage, None)

    def end_batch(self, trainer: pl.Trainer) -> None:
        """Record that it has ended, and what is allocated on the device."""
        self.batch = None
        allocated_bytes = _allocated_bytes(trainer.strategy.root_device)
        if allocated_bytes is not None:
            num_before = self.ends[-1][0] if self.ends else 0
            if self.stage == "train":
                num_before = trainer.fit_loop.epoch_loop.total_batch_idx
            self.ends.append((num_before + 1, allocated_bytes))


def _allocated_bytes(device: torch.device) -> int | None:
    return read_allocator(device).allocated_bytes if has_cache(device) else None


_NAME = "out_of_memory"
_FOREIGN = "not of this run"
_REST = "uncategorized"
_LARGE_SHARE = 0.25  # of what is allocated
_MOST_REMEDIES = 10
_MOST_CHARACTERS = 200
_MOST_SECONDS = 30


def explain(
    trainer: pl.Trainer, error: BaseException, source: OutOfMemorySource, last: LastBatches, folder: Path
) -> str:
    """Write the report, and pictures, into ``folder``; return a note. Raises nothing, which would hide the error."""
    most = f"for at most {_MOST_SECONDS} s; Ctrl-C skips the rest"
    rank_zero_info(f"VRAMMonitor: out of memory. Estimating which features would help, {most} ...")
    try:
        if trainer.progress_bar_callback is not None:  # it ends before another one begins
            trainer.progress_bar_callback.on_exception(trainer, trainer.lightning_module, error)
        found, estimate = _with_remedies(trainer, _facts(trainer, error, source, last), last)
        folder.mkdir(parents=True, exist_ok=True)
        stem = _NAME if trainer.global_rank == 0 else f"{_NAME}.rank{trainer.global_rank}"
        path = folder / f"{stem}.md"
        write_page(found, path, _write_pictures(trainer, folder, stem, estimate))
        return f"VRAMMonitor: {summary(found)} Report: {path}"
    except (Exception, KeyboardInterrupt) as failure:
        return f"VRAMMonitor could not write its report: {type(failure).__name__}: {failure}"


def _facts(trainer: pl.Trainer, error: BaseException, source: OutOfMemorySource, last: LastBatches) -> OutOfMemory:
    device = trainer.strategy.root_device
    errors = path_to_out_of_memory(error)
    request = read_failed_request(str(errors[-1]), device)
    by_category, by_module = _memory_at_error(trainer, last, request)
    where = f", batch {last.batch_idx}" if last.batch is not None else ""
    return OutOfMemory(
        message=str(errors[-1]),
        source=source,
        device=str(device),
        request=request,
        stage=f"{last.stage}, epoch {trainer.current_epoch}{where}",
        place=read_place(errors, trainer.lightning_module),
        by_category=by_category,
        by_module=by_module,
        growth=tuple(last.ends),
    )


def _memory_at_error(
    trainer: pl.Trainer, last: LastBatches, request: FailedRequest
) -> tuple[dict[str, int], dict[str, int]]:
    """What was allocated, by category and by module: as it was tracked, else what can be found, and the rest."""
    device = trainer.strategy.root_device
    timeline = last.timeline
    if timeline is None or not timeline.peak_bytes:
        with track_memory(trainer.lightning_module, optimizers=trainer.optimizers, inputs=last.batch) as tracker:
            pass
        timeline = tracker.timeline.on(str(device))
    by_category = {str(category): size for category, size in timeline.peak_by_category.items()}
    rest_bytes = (request.allocated_bytes or 0) - timeline.peak_bytes
    if rest_bytes > 0:
        by_category[_REST] = rest_bytes
    return by_category, dict(timeline.peak_by_module)


def _with_remedies(
    trainer: pl.Trainer, found: OutOfMemory, last: LastBatches
) -> tuple[OutOfMemory, MemoryEstimate | None]:
    reason = _why_not(trainer, last)
    if reason:
        return replace(found, no_remedies=f"{reason}{_half_batch_hint(found, last)}"), None
    limit = _Limit()
    try:
        with ProgressDisplay.of(trainer) as on_progress:
            if last.stage != "train":
                # It ran out with this much allocated: of what is free, fragmentation may leave nothing usable.
                room_bytes = found.request.room_bytes
                if room_bytes is not None:
                    found = replace(found, budget_bytes=min(room_bytes, found.request.allocated_bytes or room_bytes))
                return _measure_evaluation(trainer, found, last, limit, on_progress), None
            estimate, measured, cut = _measure(trainer, found, last, limit, on_progress)
    except (Exception, KeyboardInterrupt) as error:  # a step on tensors without values may fail where the run does not
        reason = f"{type(error).__name__}: {error}".partition("\n")[0]
        reason = "stopped by Ctrl-C." if isinstance(error, KeyboardInterrupt) else f"{reason:.{_MOST_CHARACTERS}}"
        return replace(found, no_remedies=f"{reason}{_half_batch_hint(found, last)}"), None
    timeline = estimate.timeline
    by_module = found.by_module if last.timeline is not None else dict(timeline.peak_by_module)
    found = replace(found, budget_bytes=_budget_bytes(found, timeline))
    remedies = _ranked(measured, found.budget_bytes)
    by_category = dict(found.by_category)
    by_category[Category.ACTIVATIONS] += by_category.pop(_REST, 0)  # of a training step it is nearly all of the rest
    found = replace(found, estimated=timeline, by_category=by_category, by_module=by_module, remedies=remedies, cut=cut)
    return _without_foreign(found, timeline), estimate


def _foreign_bytes(found: OutOfMemory, estimated: MemoryTimeline) -> int:
    """Bytes in tensors that a step does not have, of another model, say. A small difference is estimation error."""
    allocated_bytes = found.request.allocated_bytes or 0
    foreign_bytes = allocated_bytes - estimated.peak_bytes
    return foreign_bytes if foreign_bytes > _LARGE_SHARE * allocated_bytes else 0


def _without_foreign(found: OutOfMemory, estimated: MemoryTimeline) -> OutOfMemory:
    foreign_bytes = _foreign_bytes(found, estimated)
    if not foreign_bytes:
        return found
    own = dict(found.by_category)
    own[Category.ACTIVATIONS] = max(0, own[Category.ACTIVATIONS] - foreign_bytes)
    return replace(found, foreign_bytes=foreign_bytes, by_category={**own, _FOREIGN: foreign_bytes})


def _why_not(trainer: pl.Trainer, last: LastBatches) -> str:
    """Why no step of this run can run again on fake tensors; empty if one can."""
    if last.batch is None:
        return "the error was outside of a batch, and features save memory within a step."
    strategy, plugin = type(trainer.strategy), type(trainer.precision_plugin)
    is_other_strategy = not issubclass(strategy, SingleDeviceStrategy | DDPStrategy)
    if is_other_strategy or plugin.__module__.startswith("lightning_vram."):
        name = strategy.__name__ if is_other_strategy else plugin.__name__
        return f"{name} has changed the module. `lightning-vram plan --config ...` does it before."
    return ""


def _half_batch_hint(found: OutOfMemory, last: LastBatches) -> str:
    """What a smaller batch of an evaluation would save: it scales all but what is there for the whole run."""
    kinds = (Category.INPUTS, Category.ACTIVATIONS, Category.TEMPORARIES, _REST)
    num_bytes = sum(found.by_category.get(kind, 0) for kind in kinds) // 2
    if last.batch is None or last.stage == "train" or not num_bytes:
        return ""
    return f" Half the `batch_size` of this data loader would need up to {format_bytes(num_bytes)} less."


class _Limit:
    """What ends the estimates: the time limit, and Ctrl-C once the baseline is known."""

    def __init__(self) -> None:
        self._started, self._baseline_seconds, self._is_interrupted = monotonic(), 0.0, False

    def is_late(self) -> bool:
        """Whether another configuration, which takes as long as the baseline, would be too late. Asked after that."""
        seconds = monotonic() - self._started
        self._baseline_seconds = self._baseline_seconds or seconds
        return seconds + self._baseline_seconds > _MOST_SECONDS

    def note(self, num_left_out: int) -> str:
        """Say what ended the estimates early; empty if nothing did."""
        seconds = monotonic() - self._started
        if self._is_interrupted:
            return f"Stopped by Ctrl-C after {seconds:.0f} s: other configurations were not tried."
        s = "" if num_left_out == 1 else "s"
        cut = f"{num_left_out} configuration{s} {'were' if s else 'was'} not tried."
        return f"Stopped at the limit of {_MOST_SECONDS} s: {cut}" if num_left_out else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, place: TracebackType | None
    ) -> bool:
        self._is_interrupted = kind is KeyboardInterrupt
        return self._is_interrupted and self._baseline_seconds > 0


def _measure(
    trainer: pl.Trainer, found: OutOfMemory, last: LastBatches, limit: _Limit, on_progress: Progress
) -> tuple[MemoryEstimate, list[Measured], str]:
    """Run steps on fake tensors: the baseline, and with features; and describe what of it was left out."""
    module, own = trainer.lightning_module, read_trainer_arguments(trainer)
    spec, card = _free_device(trainer, found)
    run = FitRun(own, card, num_ranks=trainer.world_size, with_validation=False, with_times=True, known=[])
    on_progress("tracing baseline", 0.0)
    traced = trace_fit(module, last.batch, run)
    stage = estimate_stages(traced, None if card is None else workspaces_of(card))[STEP]
    budget_bytes = _budget_bytes(found, stage.timeline)
    available = spec if budget_bytes is None else DeviceSpec("available to this step", budget_bytes)
    steps = TracedSteps(module, last.batch, run, on_progress, is_late=limit.is_late)
    exact, every = (
        remedies_for(own, level, on_card=card is not None, module=module) for level in (Exactness.EXACT, Exactness.ANY)
    )
    with limit:
        measure_singles(steps, exact, every, budget_bytes)
    estimate = MemoryEstimate(available, {TRAIN: stage}, batch_size=steps.batch_size)
    return estimate, steps.tried, limit.note(len(steps.left_out))


def _free_device(trainer: pl.Trainer, found: OutOfMemory) -> tuple[DeviceSpec, DeviceSpec | None]:
    """Undo the features, and return the device, twice if it is an accelerator."""
    device = trainer.strategy.root_device
    _undo_features(trainer)
    if has_cache(device):
        empty_cache(device)  # the estimate copies tensors that are not parameters
    spec = describe_device(device, found.request.room_bytes or found.request.allocated_bytes or 1)
    return spec, None if device.type == "cpu" else spec


def _measure_evaluation(
    trainer: pl.Trainer, found: OutOfMemory, last: LastBatches, limit: _Limit, on_progress: Progress
) -> OutOfMemory:
    """Run batches of an evaluation on fake tensors; what they save, the run would save, too."""
    own = read_trainer_arguments(trainer)
    _, card = _free_device(trainer, found)
    run = FitRun(own, card, num_ranks=trainer.world_size, evaluation=last.stage)
    how: dict[str, Any] = {"keeps_precision": trainer.state.fn == "fit", "is_late": limit.is_late}
    measured: list[LeanerEvaluation | None] = []
    with limit:
        for one in measure_evaluation(trainer.lightning_module, last.batch, run, on_progress, **how):
            measured.append(one)  # what an interrupt leaves
    baseline, *leaner = filter(None, measured)
    request, remedies = found.request, []
    # What a training, or the batches before, have left stays. At least what was asked for is missing, as it seems.
    asked_bytes, budget_bytes = request.asked_bytes or 0, found.budget_bytes
    for one in leaner:
        saved_bytes = baseline.needed_bytes - one.needed_bytes
        needed_bytes = max(one.needed_bytes, (request.allocated_bytes or 0) + asked_bytes - saved_bytes)
        fits = None if budget_bytes is None else needed_bytes <= budget_bytes and saved_bytes >= asked_bytes
        if saved_bytes > 0:
            remedies.append(Remedy(one.code, needed_bytes, saved_bytes, None, one.results, fits))
    remedies.sort(key=lambda remedy: not remedy.fits)
    return replace(found, remedies=tuple(remedies), cut=limit.note(measured.count(None)))


def _budget_bytes(found: OutOfMemory, estimated: MemoryTimeline) -> int | None:
    """What a step may need; ``None`` if unknown. At least what was requested is missing, as it seems."""
    room_bytes = found.request.room_bytes
    if room_bytes is None:
        return None
    missing_bytes = found.request.asked_bytes or 0
    return max(1, min(room_bytes - _foreign_bytes(found, estimated), estimated.peak_bytes - missing_bytes))


def _undo_features(trainer: pl.Trainer) -> None:
    """Restore the module to its state before the run, which is over. Features do nothing when undone again."""
    for callback in list(trainer.callbacks):  # type: ignore[attr-defined]
        if isinstance(callback, FitTechnique) and not getattr(callback, "takes_no_memory", False):
            callback.give_up()  # teardown may move offloaded tensors to the device, which is full


def _ranked(tried: list[Measured], budget_bytes: int | None) -> tuple[Remedy, ...]:
    """What saves anything: first what fits, by exactness and time, then what comes nearest."""
    baseline = tried[0]
    ranked: list[tuple[Any, Remedy]] = []
    seen = set()
    for one in sorted(tried, key=lambda one: one.seconds):
        saved_bytes = baseline.needed_bytes - one.needed_bytes
        if saved_bytes <= 0:
            continue
        fits = None if budget_bytes is None else one.needed_bytes <= budget_bytes
        exactness = one.scheme.exactness
        # an argument may differ by what changes nothing, such as budgets of 5493 and 5494 KiB
        alike = (one.needed_bytes, exactness, *sorted(part.name for part in one.scheme.parts))
        if alike in seen:
            continue
        seen.add(alike)
        ratio = one.seconds / baseline.seconds
        remedy = Remedy(as_code(one.scheme.parts), one.needed_bytes, saved_bytes, ratio, results_of(exactness), fits)
        ranked.append(((not fits, exactness if fits else 0, ratio if fits else one.needed_bytes), remedy))
    return tuple(remedy for _, remedy in sorted(ranked, key=lambda pair: pair[0])[:_MOST_REMEDIES])


def _write_pictures(trainer: pl.Trainer, folder: Path, stem: str, estimate: MemoryEstimate | None) -> list[str]:
    names = []
    # If nothing is available to the step, as where other tensors fill the device, there is no limit to draw.
    if estimate is not None and estimate.device.memory_bytes > 1 and find_spec("matplotlib") is not None:
        needed, limit = format_bytes(estimate.needed_bytes), format_bytes(estimate.device.memory_bytes)
        title = f"Out of memory: this step needs {needed}, {estimate.device.name}: {limit}"
        picture(estimate, title).write(folder / f"{stem}.png")
        names.append(f"{stem}.png")
    if trainer.strategy.root_device.type == "cuda" and write_snapshot(folder / f"{stem}.pickle", _named(trainer)):
        names.append(f"{stem}.pickle")
    return names


def _named(trainer: pl.Trainer) -> Iterator[tuple[str, Tensor]]:
    """All tensors that the run holds by a name."""
    names: dict[Tensor, str] = {}
    parameter: Tensor
    for name, parameter in trainer.lightning_module.named_parameters():
        names[parameter] = name
        yield f"parameters: {name}", parameter
        if parameter.grad is not None:
            yield f"gradients: {name}", parameter.grad
    for name, buffer in trainer.lightning_module.named_buffers():
        yield f"buffers: {name}", buffer
    for optimizer in trainer.optimizers:
        for parameter, state in optimizer.state.items():
            name = names.get(parameter, "")
            yield from ((f"optimizer state: {name}", tensor) for tensor in tensors_in(state))
