"""The report about an out-of-memory error: facts of the run, and which features would have helped."""

import linecache
import sys
import sysconfig
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import chain
from math import nan
from pathlib import Path
from time import monotonic
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_vram.callbacks.hook_points import FitTechnique
from lightning_vram.estimation.batches import batch_size_of
from lightning_vram.estimation.estimate import Progress, estimate_stages
from lightning_vram.estimation.running_trainer import describe_device, read_trainer_arguments
from lightning_vram.estimation.traced_fit import STEP, FitRun, reason_of, trace_fit
from lightning_vram.memory.device.accelerators import empty_cache, has_cache, read_allocator, shares_host_memory
from lightning_vram.memory.device.out_of_memory import (
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
from lightning_vram.planner.plan import MemoryPlan, TracedSteps
from lightning_vram.planner.scheme import Exactness, Found, Workload
from lightning_vram.planner.search import fastest
from lightning_vram.report.estimate import picture
from lightning_vram.report.out_of_memory import OutOfMemory, Place, Work, page, summary
from lightning_vram.report.plan import choices
from lightning_vram.report.progress import show_progress

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
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        posix = path.replace("\\", "/")
        if "/torch/optim/" in posix or "/lightning_vram/optimizers/" in posix:
            work = Work.OPTIMIZER_STEP
        elif name in _IN_BACKWARD and ("/torch/autograd/" in posix or posix.endswith("/torch/_tensor.py")):
            work = Work.BACKWARD
        else:
            work = _BY_FUNCTION.get(name, work)
        inner = names.get(id(frame.f_locals.get("self")), "") or inner
        if path.endswith("nn/functional.py"):
            function = name
        is_file = not path.startswith("<") and path != sys.executable
        if is_file and not path.startswith((_OWN_FOLDER, *_LIBRARIES)) and "site-packages" not in path:  # the user's
            line = f"{Path(path).name}:{number}: {linecache.getline(path, number).strip():.{_MOST_CHARACTERS_OF_LINE}}"
    return Place(work, "" if work in (Work.RESTORING, Work.SAVING, Work.MOVING) else inner, line, function)


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
        self.batch, device = None, trainer.strategy.root_device
        if has_cache(device):
            num_before = self.ends[-1][0] if self.ends else 0
            if self.stage == "train":
                num_before = trainer.fit_loop.epoch_loop.total_batch_idx
            self.ends.append((num_before + 1, read_allocator(device).allocated_bytes))


_NAME = "out_of_memory"
_FOREIGN = "not of this run"
_REST = "uncategorized"
_LARGE_SHARE = 0.25  # of what is allocated
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
        found = _facts(trainer, error, source, last)
        estimate = _add_remedies(trainer, found, last)
        folder.mkdir(parents=True, exist_ok=True)
        stem = _NAME if trainer.global_rank == 0 else f"{_NAME}.rank{trainer.global_rank}"
        path = folder / f"{stem}.md"
        path.write_text(page(found, _write_pictures(trainer, folder, stem, estimate)), encoding="utf-8")
        return f"VRAMMonitor: {summary(found)} Report: {path}"
    except (Exception, KeyboardInterrupt) as failure:
        return f"VRAMMonitor could not write its report: {type(failure).__name__}: {failure}"


def _facts(trainer: pl.Trainer, error: BaseException, source: OutOfMemorySource, last: LastBatches) -> OutOfMemory:
    """Read off what is known; what was not tracked is searched for, and the rest is of no category."""
    device, timeline, errors = trainer.strategy.root_device, last.timeline, path_to_out_of_memory(error)
    request = read_failed_request(str(errors[-1]), device)
    if timeline is None or not timeline.peak_bytes:
        with track_memory(trainer.lightning_module, optimizers=trainer.optimizers, inputs=last.batch) as tracker:
            pass
        timeline = tracker.timeline.on(str(device))
    by_category = {str(category): size for category, size in timeline.peak_by_category.items()}
    model = trainer.model
    rest_bytes = (request.allocated_bytes or 0) - timeline.peak_bytes
    return OutOfMemory(
        message=str(errors[-1]),
        source=source,
        device=str(device),
        request=request,
        stage=f"{last.stage}, epoch {trainer.current_epoch}{f', batch {last.batch_idx}' * (last.batch is not None)}",
        place=read_place(errors, trainer.lightning_module),
        by_category=by_category | ({_REST: rest_bytes} if rest_bytes > 0 else {}),
        by_module=dict(timeline.peak_by_module),
        growth=tuple(last.ends),
        shares_host_memory=shares_host_memory(device),
        may_view_buckets=isinstance(model, DistributedDataParallel)
        and not model.gradient_as_bucket_view
        and trainer.accumulate_grad_batches == 1,
    )


def _add_remedies(trainer: pl.Trainer, found: OutOfMemory, last: LastBatches) -> MemoryEstimate | None:
    """Add what would help, by steps on fake tensors; return the estimate of this run's step."""
    found.no_remedies = _why_not(trainer, found, last)
    if not found.no_remedies:
        try:
            with show_progress(trainer) as on_progress:
                return _search(trainer, found, last, on_progress)
        except KeyboardInterrupt:
            found.no_remedies = "stopped by Ctrl-C."
        except Exception as error:  # a step on tensors without values may fail where the run does not
            found.no_remedies = f"{reason_of(error)}."
    return None


def _why_not(trainer: pl.Trainer, found: OutOfMemory, last: LastBatches) -> str:
    """Why no step of this run can run again on fake tensors; empty if one can."""
    if last.batch is None:
        return "the error was outside of a batch, and features save memory within a step."
    if last.stage != "train":
        kinds = (Category.INPUTS, Category.ACTIVATIONS, Category.TEMPORARIES, _REST)  # what grows with the batch
        half = format_bytes(sum(found.by_category.get(kind, 0) for kind in kinds) // 2)
        return (
            "an evaluation has no backward that features could save memory for. Half the `batch_size` of this data "
            f"loader would need up to {half} less."
        )
    strategy, plugin = type(trainer.strategy), type(trainer.precision_plugin)
    is_other_strategy = not issubclass(strategy, SingleDeviceStrategy | DDPStrategy)
    if is_other_strategy or plugin.__module__.startswith("lightning_vram."):
        name = strategy.__name__ if is_other_strategy else plugin.__name__
        return f"{name} has changed the module. `lightning-vram plan --config ...` does it before."
    return ""


def _search(trainer: pl.Trainer, found: OutOfMemory, last: LastBatches, on_progress: Progress) -> MemoryEstimate:
    """Run the step on fake tensors, and search for what fits."""
    started, device = monotonic(), trainer.strategy.root_device
    own = read_trainer_arguments(trainer)
    _undo_features(trainer)
    if has_cache(device):
        empty_cache(device)  # the estimate copies tensors that are not parameters
    spec = describe_device(device, found.request.room_bytes or found.request.allocated_bytes or 1)
    card = None if device.type == "cpu" else spec
    run = FitRun(own, card, num_ranks=trainer.world_size, with_validation=False, with_times=True, known=[])
    on_progress("tracing baseline", 0.0)
    traced = trace_fit(trainer.lightning_module, last.batch, run)
    stage = estimate_stages(traced, None if card is None else workspaces_of(card))[STEP]
    _add_estimate(found, stage.timeline, is_tracked=last.timeline is not None)
    step_seconds = monotonic() - started

    def is_late() -> bool:
        return monotonic() - started + step_seconds > _MOST_SECONDS

    steps = TracedSteps(trainer.lightning_module, last.batch, run, on_progress, is_late=is_late)
    available = spec if found.budget_bytes is None else DeviceSpec("available to this step", found.budget_bytes)
    estimate = MemoryEstimate(available, {TRAIN: stage}, batch_size=batch_size_of(last.batch) or 0)
    _find_remedies(steps, found, estimate)
    return estimate


def _find_remedies(steps: TracedSteps, found: OutOfMemory, estimate: MemoryEstimate) -> None:
    """Search as a plan does: for what is exact, else for anything; add its table, and what ended it early."""
    is_known = found.budget_bytes not in (None, 1)  # 1: more was asked for than a step has
    budget_bytes = found.budget_bytes or estimate.peak_bytes // 2  # half, if it is unknown
    try:
        for level in (Exactness.EXACT, Exactness.ANY):
            if steps.search(level, budget_bytes).best is not None:
                break
    except KeyboardInterrupt:
        if not steps.tried:
            raise
        found.cut = "Stopped by Ctrl-C: other configurations were not tried."
    if steps.left_out:
        num = len(steps.left_out)
        found.cut = f"Stopped at the limit of {_MOST_SECONDS} s: {num} more configuration{'s' * (num > 1)} not tried."
    best = fastest(steps.tried, Workload(budget_bytes).fits)
    plan = MemoryPlan(estimate.device, budget_bytes, Found(best, steps.tried[0], tuple(steps.tried)))
    rows = choices(plan, lambda scheme: f"`{scheme.to_code()}`" if scheme.parts else "baseline")
    if len(rows) > 1:
        found.remedies = rows if is_known else [replace(row, share=nan, is_plan=False) for row in rows]


def _add_estimate(found: OutOfMemory, estimated: MemoryTimeline, *, is_tracked: bool) -> None:
    """Add what an estimated step tells: its activations, other tensors of the process, and what it may use."""
    request, peak_bytes, by_category = found.request, estimated.peak_bytes, found.by_category
    by_category[Category.ACTIVATIONS] += by_category.pop(_REST, 0)  # of a training step it is nearly all of the rest
    allocated_bytes = request.allocated_bytes or 0
    if allocated_bytes - peak_bytes > _LARGE_SHARE * allocated_bytes:  # of another model, say; less is estimation error
        found.foreign_bytes = by_category[_FOREIGN] = allocated_bytes - peak_bytes
        by_category[Category.ACTIVATIONS] = max(0, by_category[Category.ACTIVATIONS] - found.foreign_bytes)
    if request.room_bytes is not None:  # at least what was requested is missing, as it seems
        room_bytes = request.room_bytes - found.foreign_bytes
        found.budget_bytes = max(1, min(room_bytes, peak_bytes - (request.asked_bytes or 0)))
    if not is_tracked:
        found.by_module = dict(estimated.peak_by_module)


def _undo_features(trainer: pl.Trainer) -> None:
    """Restore the module to its state before the run, which is over. Features do nothing when undone again."""
    for callback in list(trainer.callbacks):  # type: ignore[attr-defined]
        if isinstance(callback, FitTechnique) and not getattr(callback, "takes_no_memory", False):
            callback.give_up()  # teardown may move offloaded tensors to the device, which is full


def _write_pictures(trainer: pl.Trainer, folder: Path, stem: str, estimate: MemoryEstimate | None) -> list[str]:
    names = []
    # If nothing is available to the step, as where other tensors fill the device, there is no limit to draw.
    if estimate is not None and estimate.device.memory_bytes > 1 and find_spec("matplotlib") is not None:
        needed, limit = format_bytes(estimate.needed_bytes), format_bytes(estimate.device.memory_bytes)
        title = f"Out of memory: this step needs {needed}, {estimate.device.name}: {limit}"
        picture(estimate, title).write(folder / f"{stem}.png")
        names.append(f"{stem}.png")
    if write_snapshot(folder / f"{stem}.pickle", trainer.strategy.root_device.type):
        names.append(f"{stem}.pickle")
    return names
