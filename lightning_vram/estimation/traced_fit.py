"""Two steps of ``Trainer.fit`` on fake tensors, every byte noted."""

import copy
import math
import re
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import is_
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from typing_extensions import override

from lightning_vram.core.host.transfers import copies_noted
from lightning_vram.estimation import fake_trainer
from lightning_vram.estimation.batches import FreshBatches, batch_size_of, first_samples, map_tensors
from lightning_vram.estimation.step_time import StepClock, StepTime
from lightning_vram.memory.device.out_of_memory import is_out_of_memory
from lightning_vram.memory.estimate.caching_allocator import as_on_gpu
from lightning_vram.memory.estimate.cuda_kernels import Scratch
from lightning_vram.memory.estimate.cuda_semantics import cuda_semantics
from lightning_vram.memory.estimate.device_spec import DeviceSpec
from lightning_vram.memory.estimate.fake_device import FAKE_GPU, HOST, FakeTensors, fake_device, fake_ranks
from lightning_vram.memory.estimate.known_values import KnownValues, RecordedReads, recorded
from lightning_vram.memory.host import available_host_bytes
from lightning_vram.memory.tracking.timeline import MemoryTimeline
from lightning_vram.memory.tracking.tracker import MemoryTracker, track_memory
from lightning_vram.memory.units import MIB, format_bytes
from lightning_vram.private_names.dispatcher import UNKNOWN_VALUES, UnsupportedOperatorException, without_modes
from lightning_vram.private_names.lightning import ddp_arguments
from lightning_vram.private_names.torch import forget_compiled_steps

FIRST_STEP, STEP, VALIDATION = "first step", "train", "validation"
_MOST_BATCHES = 256
_USUAL_CAPABILITY = (8, 0)
_FEW = 8  # samples
_MOST_MADE_BYTES = 4 << 30  # by operators, in real steps of a whole batch: some 20 s
_PER_WEIGHT_BYTE = 5  # the copy of a weight, its gradient, two moments, and what the step itself takes
_LIGHT_BYTES = 256 * MIB  # of weights, with which real steps are quick
_NOT_THE_USERS = ("torch", "lightning", "lightning_vram", "importlib", "contextlib")
_READS = "The step reads values of tensors{}, so it must run once on real tensors, on the CPU"
_HIDDEN_READS = "data is not allocated", "_local_scalar_dense"
_WITHOUT_ATEN = partial(re.sub, r"\baten[.:]+(\w+)[.\w]*", r"\1")
_HOST_SPEC = DeviceSpec("cpu", memory_bytes=1)


@dataclass(frozen=True)
class TracedFit:
    """What two steps and a validation did."""

    timeline: MemoryTimeline
    spans: Mapping[str, tuple[int, int]]  # first event and the one after the last, by stage
    notes: tuple[str, ...] = ()  # what a reader of the numbers should know
    times: Mapping[str, StepTime] = field(default_factory=dict)  # of each stage; empty without ``with_times``
    layers: str = ""  # what each layer does, as a table, if a callback has planned it
    host_bytes: int = 0  # what the strategy will have at rest on the host

    def stage(self, name: str) -> MemoryTimeline:
        """The timeline of one stage, with what it found."""
        return self.timeline.between(*self.spans[name])


@dataclass(frozen=True)
class FitRun:
    """What is run."""

    trainer_arguments: Mapping[str, Any]  # of the user's Trainer
    card: DeviceSpec | None = None  # what it runs on; ``None`` is the host
    num_ranks: int = 1  # processes, all of which do the same
    with_validation: bool = True  # after the steps
    with_times: bool = False  # whether to count what the operators take
    run_callbacks: fake_trainer.RunCallbacks = ()  # the user's callbacks that are run, by classes or names
    # The first run of a Trainer and what came of it, for others of the same; ``None``: not shared.
    known: list[tuple["FitRun", list[Any], TracedFit]] | None = field(default=None, compare=False)
    has_values: bool = False  # whether tensors of the batch keep their values, so that bad indices are noticed
    # What a real run has read of its tensors, for all runs of the same step; empty until one of them asks.
    reads: RecordedReads = field(default_factory=RecordedReads, compare=False)


def trace_fit(module: pl.LightningModule, batch: Any, run: FitRun) -> TracedFit:
    """Run two optimizer steps and one batch of validation on fake tensors."""
    what = [module, batch, *chain(*fake_trainer.parts_of(run.trainer_arguments, run.run_callbacks).values())]
    for known, known_what, traced in run.known or ():
        is_known = replace(known, trainer_arguments={}) == replace(run, trainer_arguments={})
        is_known &= _has_bucket_views(known) == _has_bucket_views(run)  # all that a plan changes in a given strategy
        if is_known and len(what) == len(known_what) and all(map(is_, what, known_what)):
            return traced
    traced = _fit_with_reads(module, batch, run)
    if run.known is not None and not run.known:
        run.known.append((run, what, traced))
    return traced


def _has_bucket_views(run: FitRun) -> bool:
    strategy = run.trainer_arguments.get("strategy")
    return isinstance(strategy, DDPStrategy) and bool(ddp_arguments(strategy).get("gradient_as_bucket_view"))


def _fit_with_reads(module: pl.LightningModule, batch: Any, run: FitRun) -> TracedFit:
    """Trace; where unknown values are read, record those of a real run first."""
    fit = partial(_with_enough_batches, partial(_fake_fit, module, batch, run), run)
    tensors, reason = _tensors_of(module), None
    try:
        traced = fit()
        is_light = sum(one.nbytes for one in tensors) <= _LIGHT_BYTES and not any(one.is_meta for one in tensors)
        if run.reads.is_recorded or not run.reads.wanted or not is_light:
            return traced
    except UNKNOWN_VALUES as error:
        if run.reads.is_recorded:
            raise
        reason = error
    line = f" ({run.reads.wanted})" if reason is None else user_line(reason)
    _record_reads(module, batch, run, line, reason)
    return fit()


def _record_reads(module: pl.LightningModule, batch: Any, run: FitRun, line: str, reason: Exception | None) -> None:
    """Record what a real step reads, in one process on the host: with a few samples, or with all if that is quick."""
    needed_bytes, there_bytes = _check_host(module, _READS.format(line), reason)
    alone = _alone(run)
    real = map_tensors(batch, _with_values)
    size, few = batch_size_of(real) or 1, first_samples(real, _FEW)
    try:
        traced = _record(module, few, alone)
    except Exception:  # the model may refuse so few: what it raises with all of them is its word
        few = real
        traced = _record(module, real, alone)
    ratio, peak_bytes = size / (batch_size_of(few) or 1), traced.timeline.peak_bytes
    made_bytes = sum(max(0, event.change_bytes) for event in traced.timeline.events)  # about what operators take
    if ratio > 1 and ratio * made_bytes <= _MOST_MADE_BYTES and needed_bytes + ratio * peak_bytes <= there_bytes:
        few = real
        _record(module, real, alone)
    samples = f"{batch_size_of(few)} samples" if batch_size_of(real) else "the whole batch"
    scaled = "" if few is real or ratio <= 1 else " Numbers among them are not scaled to the batch."
    run.reads.note = (
        f"The step reads values of tensors{line}. Those of a real step on the CPU with {samples} are used.{scaled}"
    )


def run_whole(module: pl.LightningModule, batch: Any, run: FitRun, reason: Exception) -> TracedFit:
    """Run real steps of a batch on the host, for what cannot be traced, and say that they were run on the device."""
    why = f"The step cannot be traced: {reason_of(reason)}"
    _check_host(module, f"{why}. It must run on real tensors, on the CPU", reason)
    traced = trace_real_fit(module, map_tensors(batch, _with_values), _alone(run))
    device = str(HOST if run.card is None else FAKE_GPU)
    allocations = tuple(replace(one, device=device) for one in traced.timeline.allocations)
    timeline = replace(traced.timeline, allocations=allocations, device=device)
    note = f"{why}. It was run on the CPU, with the whole batch."
    return replace(traced, timeline=timeline, notes=(*traced.notes, note))


def _check_host(module: pl.LightningModule, why: str, reason: Exception | None) -> tuple[int, float]:
    """Return host bytes that real steps need about, without activations, and those available."""
    tensors = _tensors_of(module)
    if any(tensor.is_meta for tensor in tensors):
        raise ValueError(f"{why}. Pass a module whose weights are not on the meta device.") from reason
    needed_bytes, there_bytes = _PER_WEIGHT_BYTE * sum(one.nbytes for one in tensors), available_host_bytes()
    if there_bytes is not None and needed_bytes > there_bytes:
        has, needs = format_bytes(there_bytes), format_bytes(needed_bytes)
        raise ValueError(f"{why}. That needs about {needs} of host memory; {has} is available.") from reason
    return needed_bytes, math.inf if there_bytes is None else there_bytes


def _alone(run: FitRun) -> FitRun:
    arguments = {**run.trainer_arguments, "strategy": "auto"}
    return replace(run, card=None, num_ranks=1, with_times=False, trainer_arguments=arguments)


def _record(module: pl.LightningModule, batch: Any, run: FitRun) -> TracedFit:
    with recorded(run.reads):
        return trace_real_fit(module, batch, run)


def _with_values(tensor: Tensor) -> Tensor:
    if not tensor.is_meta:
        return tensor
    return (torch.randn if tensor.is_floating_point() else torch.ones)(tensor.shape, dtype=tensor.dtype)


def user_line(error: Exception | None) -> str:
    """Name the line of the user's code that an error comes from, in brackets; nothing if there is none."""
    frames = traceback.walk_tb(error.__traceback__) if error is not None else ()
    lines = [
        f" ({Path(frame.f_code.co_filename).name}:{number})"
        for frame, number in frames
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _NOT_THE_USERS
    ]
    return lines[-1] if lines else ""


def reason_of(error: Exception) -> str:
    """Say why a step cannot be traced, in words that its author can act on, and at which line of theirs."""
    text = str(error).strip().partition("\n")[0].partition(". ")[0].rstrip(".")
    if is_out_of_memory(error):
        reason = "planning ran out of host memory"
    elif isinstance(error, UnsupportedOperatorException) and getattr(error.func, "namespace", "aten") != "aten":
        reason = f"the operator {error.func} has no fake kernel; torch.library.register_fake gives it one"
    elif isinstance(error, UnsupportedOperatorException):
        reason = f"the step uses an operator that does not run on fake tensors ({_WITHOUT_ATEN(text)})"
    elif isinstance(error, UNKNOWN_VALUES) or any(words in text for words in _HIDDEN_READS):
        reason = "the step reads values in a way that cannot be recorded; .item(), .tolist() and .numpy() can be"
    else:
        reason = f"{type(error).__name__}: {_WITHOUT_ATEN(text)}"
    return reason + user_line(error)


def trace_real_fit(module: pl.LightningModule, batch: Any, run: FitRun) -> TracedFit:
    """The same on real tensors, on the host, in one process. The module is copied, weights and all."""
    what = module, fake_trainer.parts_of(run.trainer_arguments, run.run_callbacks)
    make = partial(map_tensors, batch, Tensor.clone)

    def fit(num_batches: int) -> TracedFit | None:
        # Nothing keeps the memo, which refers to all copies: a weight that is replaced must be freed.
        copies = copy.deepcopy(what, {id(one): _on_host(one) for one in _tensors_of(module) if not one.is_cpu})
        return _fit(copies, make, run, HOST, track_memory(copies[0]), num_batches)

    with fake_trainer.isolated():
        return _with_enough_batches(fit, run)


def _tensors_of(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _on_host(tensor: Tensor) -> Tensor:
    copied = tensor.detach().cpu()
    return nn.Parameter(copied, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copied


def _fake_fit(module: pl.LightningModule, batch: Any, run: FitRun, num_batches: int) -> TracedFit | None:
    tracker: MemoryTracker | None = None
    notes: dict[str, None] = {}

    def live_bytes() -> int:
        return tracker.ledger.live_bytes[str(FAKE_GPU)] if tracker is not None else 0

    def note_pinned(tensor: Tensor) -> None:
        if tracker is not None:
            tracker.ledger.note_pinned(tensor)

    with ExitStack() as stack:
        stack.enter_context(fake_trainer.isolated())
        num_bytes = run.card.memory_bytes if run.card is not None else 0
        is_shared = run.card is not None and run.card.shares_host_memory
        fakes_of = fake_device(
            num_bytes=num_bytes,
            allocated_bytes=live_bytes,
            on_pin=note_pinned,
            reads=run.reads,
            shares_host_memory=is_shared,
        )
        mode, values = stack.enter_context(fakes_of)
        if run.card is not None:
            capability = run.card.capability or _USUAL_CAPABILITY
            notes = stack.enter_context(cuda_semantics(capability, num_bytes=num_bytes, allocated_bytes=live_bytes))
        if run.num_ranks > 1 or run.trainer_arguments.get("strategy") not in fake_trainer.ON_ONE_DEVICE:
            stack.enter_context(fake_ranks(run.num_ranks))
        fakes = FakeTensors(mode, HOST)
        what, tensors = (module, fake_trainer.parts_of(run.trainer_arguments, run.run_callbacks)), _tensors_of(module)
        copies = copy.deepcopy(what, {id(tensor): fakes.fake(tensor) for tensor in tensors})
        known = values if run.has_values or run.reads.is_recorded else None
        templates = map_tensors(batch, partial(_template, fakes, known))
        make = partial(map_tensors, templates, partial(values.fresh_like, mode))
        del fakes  # it knows the storages that the module begins with: whoever puts others there frees those
        tracker = track_memory(copies[0])
        traced = _fit(copies, make, run, HOST if run.card is None else FAKE_GPU, tracker, num_batches)
    said = [run.reads.note] if run.reads.note else values.guesses
    return traced and replace(traced, notes=(*notes, *said, *traced.notes))


def _template(fakes: FakeTensors, values: KnownValues | None, tensor: Tensor) -> Tensor:
    fake = fakes.fake(tensor)
    if values is not None and type(tensor) is Tensor and not tensor.is_meta:
        values.know(fake, tensor)
    return fake


def _with_enough_batches(fit: Callable[[int], TracedFit | None], run: FitRun) -> TracedFit:
    """Run whole accumulations: schedules and manual optimization hide over how many batches they go."""
    num_accumulated = run.trainer_arguments.get("accumulate_grad_batches") or 1
    num_batches = min(fake_trainer.NUM_STEPS * num_accumulated, _MOST_BATCHES)
    while num_batches <= _MOST_BATCHES:
        if (traced := fit(num_batches)) is not None:
            return traced
        num_batches *= 2
    raise ValueError(f"No optimizer has stepped twice within {_MOST_BATCHES} batches: there is no step to estimate.")


def _fit(
    copies: tuple[pl.LightningModule, dict[str, list[Any]]],
    make_batch: Callable[[], Any],
    run: FitRun,
    device: torch.device,
    tracker: MemoryTracker,
    num_batches: int,
) -> TracedFit | None:
    """Fit; ``None``: the optimizers have not stepped twice within ``num_batches``."""
    module, parts = copies
    forget_compiled_steps(module)
    given = fake_trainer.as_list(run.trainer_arguments.get("callbacks"))
    fake_trainer.run_without_ends(module, parts["callbacks"], given, run.run_callbacks)
    with ExitStack() as stack:
        stack.enter_context(tracker)
        clock = StepClock(run.card or _HOST_SPEC, device) if run.with_times else None
        run.reads.restart()
        marks = _Marks(tracker, clock, run.reads)
        arguments, folder = {**run.trainer_arguments, **parts}, stack.enter_context(TemporaryDirectory())
        trainer = fake_trainer.make_trainer(arguments, device, run.num_ranks, marks, folder)
        connect = trainer.strategy.setup_environment  # past modes: values of meshes of ranks count
        trainer.strategy.setup_environment = without_modes()(connect)  # type: ignore[method-assign]
        if isinstance(trainer.strategy, DDPStrategy):
            fake_trainer.FakeReducer(trainer.strategy, tracker.label_gradients)
        stack.callback(register_optimizer_step_post_hook(marks.count_step).remove)
        if run.card is not None and device == FAKE_GPU:  # before the tracker: when the results of an operator are there
            stack.enter_context(Scratch(run.card, device, tracker.ledger.note_scratch))
        for context in () if clock is None else (copies_noted(clock.note_copy), clock):
            stack.enter_context(context)
        trainer.limit_val_batches = int(run.with_validation)
        trainer.fit(module, FreshBatches(make_batch, num_batches), FreshBatches(make_batch, 1))
    if (spans := marks.spans()) is None:
        return None
    timeline = tracker.timeline.on(str(device))
    tables = (getattr(one, "layer_table", "") for one in trainer.callbacks)  # type: ignore[attr-defined]
    return TracedFit(
        timeline=timeline if device == HOST else as_on_gpu(timeline),
        spans=spans,
        notes=tuple(fake_trainer.left_out_note(given, run.run_callbacks)),
        times=marks.times(),
        layers=next(filter(None, tables), ""),
        host_bytes=getattr(trainer.strategy, "host_bytes", 0),
    )


class _Marks(Callback):
    """Notes at which event each step has ended, and the validation."""

    def __init__(self, tracker: MemoryTracker, clock: StepClock | None, reads: RecordedReads) -> None:
        self._tracker = tracker
        self._reads = reads
        self._clock = clock
        self._ends: list[int] = []
        self._times: list[StepTime] = []
        self._num_steps = 0
        self._num_own_steps = 0
        self._end_of_validation = 0

    def count_step(self, *_: Any) -> None:
        """Note that an optimizer has stepped, past Lightning maybe."""
        self._num_own_steps += 1

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        fake_trainer.add_silent_logger(trainer)

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, _: int) -> None:
        self._tracker.label_inputs(batch)
        self._reads.begin("train")

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        is_automatic = pl_module.automatic_optimization
        num_steps = trainer.global_step + (0 if is_automatic else self._num_own_steps)
        is_skipped = is_automatic and not outputs  # the step has returned None
        if (num_steps > self._num_steps and not is_skipped) or not trainer.optimizers:
            self._ends.append(len(self._tracker.ledger.events))
            if self._clock is not None:
                self._times.append(self._clock.now)
        self._num_steps = num_steps

    @override
    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._tracker.label_inputs(batch)
        self._reads.begin("evaluation")

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        fake_trainer.stay_on_card(trainer, pl_module)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_of_validation = len(self._tracker.ledger.events)

    def spans(self) -> dict[str, tuple[int, int]] | None:
        """First event and the one after the last, by stage. ``None`` if there were too few steps."""
        if len(self._ends) < fake_trainer.NUM_STEPS:
            return None
        before, end = self._ends[-2:]
        spans = {FIRST_STEP: (0, self._ends[0]), STEP: (before, end)}
        if self._end_of_validation:
            spans[VALIDATION] = (end, self._end_of_validation)
        return spans

    def times(self) -> dict[str, StepTime]:
        """What the steps took."""
        return {FIRST_STEP: self._times[0], STEP: self._times[-1] - self._times[-2]} if self._times else {}
