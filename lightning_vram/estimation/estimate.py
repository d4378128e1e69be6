"""Will it fit: runs the step on a GPU you do not have, and searches for the largest batch that fits."""

import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import accumulate, compress
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_vram.argument_checks import check_kind, check_positive_int
from lightning_vram.estimation.batches import (
    batch_size_of,
    first_batch,
    sequence_length_of,
    with_batch_size,
    with_sequence_length,
)
from lightning_vram.estimation.fake_trainer import RunCallbacks, as_list, check_run_callbacks
from lightning_vram.estimation.traced_fit import FitRun, TracedFit, run_whole, trace_fit
from lightning_vram.memory.device.out_of_memory import is_out_of_memory
from lightning_vram.memory.estimate.caching_allocator import AllocatorReplay, AllocatorSettings, read_settings
from lightning_vram.memory.estimate.device_spec import DeviceSpec, find_device
from lightning_vram.memory.estimate.known_values import MOST_INTEGERS
from lightning_vram.memory.estimate.result import MemoryEstimate, StageEstimate
from lightning_vram.memory.estimate.workspaces import Workspaces, workspaces_of
from lightning_vram.memory.host import available_host_bytes
from lightning_vram.memory.tracking.timeline import MemoryEvent
from lightning_vram.memory.tracking.tracker import SCRATCH
from lightning_vram.private_names.dispatcher import UNKNOWN_VALUES, OptimizedModule

_GROWING = AllocatorSettings(expandable_segments=True)


def estimate_stages(traced: TracedFit, workspaces: Workspaces | None) -> Mapping[str, StageEstimate]:
    """Replay the allocator over the whole run, and read off each stage."""
    found, own_settings, replays = {}, read_settings(), {}
    if workspaces is not None:
        replays = {one: AllocatorReplay(traced.timeline, workspaces, one) for one in {own_settings, _GROWING}}
    for name, (start, stop) in traced.spans.items():
        timeline, part = traced.stage(name), slice(start, stop)
        first_event = len(timeline.events) - (stop - start)  # those before stand for what the stage found
        if not replays:
            found[name] = StageEstimate(timeline, *3 * (timeline.peak_bytes,), first_event=first_event)
            continue
        own = replays[own_settings]
        found[name] = StageEstimate(
            timeline=timeline,
            allocated_bytes=max(own.allocated[part], default=0),
            reserved_bytes=max(own.reserved[part], default=0),
            expandable_reserved_bytes=max(replays[_GROWING].reserved[part], default=0),
            workspace_bytes=own.workspace_bytes,
            host_bytes=timeline.host_peak_bytes,
            pinned_bytes=timeline.pinned_peak_bytes,
            first_event=first_event,
        )
    return found


def needed_bytes(traced: TracedFit, workspaces: Workspaces | None) -> int:
    """Return what a run needs of the device, and nothing else: reserved bytes and context."""
    if workspaces is None:
        return max(traced.stage(name).peak_bytes for name in traced.spans)
    reserved = AllocatorReplay(traced.timeline, workspaces, read_settings()).reserved
    parts = (reserved[slice(*span)] for span in traced.spans.values())  # the end of the run undoes things
    return max(max(part, default=0) for part in parts) + workspaces.context_bytes


_LARGEST = 1 << 24
_EXACT_UP_TO = 512  # larger sizes are found to one part in as many
_KNOWN_INDICES = 1 << 10, 1 << 13, 1 << 16, MOST_INTEGERS  # as many, or squares or batches of them, are looked at
_MOST_CHECKS = 3
_MOST_LETTERS = 160
_DELIBERATE = (RuntimeError, ValueError, IndexError, MisconfigurationException)  # by operators and refusals of ours
_OWN = "lightning_vram."
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Limit:
    """Where a search has ended."""

    size: int | None = None  # the largest; 0 if not even 1 is possible, ``None`` if it is not known
    refusal: str = ""  # what the model raises at the next size, in one line; empty if memory is the limit


def find_limit(
    trace: Callable[[int], TracedFit],
    needed_bytes: Callable[[TracedFit], int],
    limit_bytes: int,
    sizes: Sequence[int],
    first: TracedFit,
) -> Limit:
    """Find the largest size that the model accepts and whose memory, which grows with it, is within a limit."""
    found = _Sizes(trace, needed_bytes)
    found.add(sizes[0], first)
    with suppress(*UNKNOWN_VALUES):  # what the fakes cannot tell is not the model's word
        law = found.law(sizes)
        largest = min((size for size in found.refusals if size > max(found.needs)), default=None)
        if law is not None:
            largest = _bisect(lambda size: needed_bytes(law.predict(size)) <= limit_bytes, sizes[0])
            climb = (size // sizes[0] * sizes[0] for size in _KNOWN_INDICES)
            largest = next((size for size in climb if sizes[0] < size < largest and not found.takes(size)), largest)
        for _ in range(_MOST_CHECKS):
            if largest and not found.takes(largest):
                largest = found.largest_below(largest)
            if largest is None:
                break
            if not largest or found.needs[largest] <= limit_bytes:
                return Limit(largest, found.refusals.get(largest + 1, ""))
            largest -= max(1, largest // _EXACT_UP_TO)
    return Limit()


class SizeLaw:
    """Predicts runs from runs of other sizes; a ``ValueError`` if those did not do the same."""

    def __init__(self, known: Mapping[int, TracedFit]) -> None:
        self._sizes = tuple(known)
        runs, without_scratch = tuple(known.values()), tuple(map(_without_scratch, known.values()))
        self._runs = next((some for some in (runs, without_scratch) if len(set(map(_shape_of, some))) == 1), ())
        if not self._runs:
            raise ValueError(f"the step differs between the sizes {', '.join(map(str, self._sizes))}")

    def predict(self, size: int) -> TracedFit:
        """Return the run of ``size``: each event by the polynomial through those of the known runs."""
        first, columns = self._runs[0], zip(*(run.timeline.events for run in self._runs), strict=True)
        shares = [
            math.prod(Fraction(size - other, point - other) for other in self._sizes if other != point)
            for point in self._sizes
        ]
        divisor = math.lcm(*(share.denominator for share in shares))
        mix = partial(_mix, [int(share * divisor) for share in shares], divisor)
        return replace(first, timeline=replace(first.timeline, events=tuple(map(mix, columns))))


def _mix(weights: Sequence[int], divisor: int, events: Sequence[MemoryEvent]) -> MemoryEvent:
    first = events[0]
    if all(event.change_bytes == first.change_bytes for event in events):
        return first
    weighted = sum(weight * event.change_bytes for event, weight in zip(events, weights, strict=True))
    return MemoryEvent(first.allocation, (2 * weighted + divisor) // (2 * divisor), first.phase)


def _without_scratch(run: TracedFit) -> TracedFit:
    allocations, events = run.timeline.allocations, run.timeline.events
    stays = [not allocations[event.allocation].op.endswith(SCRATCH) for event in events]
    before = list(accumulate(stays, initial=0))  # where each event is now
    starts = tuple(before[start] for start in run.timeline.backward_starts)
    timeline = replace(run.timeline, events=tuple(compress(events, stays)), backward_starts=starts)
    spans = {name: (before[start], before[end]) for name, (start, end) in run.spans.items()}
    return replace(run, timeline=timeline, spans=spans)


def _shape_of(run: TracedFit) -> int:
    """Hash what a run did, without sizes. Allocations count in order of their first event."""
    numbers: dict[int, int] = {}
    allocations = run.timeline.allocations
    steps = []
    for event in run.timeline.events:
        one, number = allocations[event.allocation], numbers.setdefault(event.allocation, len(numbers))
        steps.append((number, one.op, one.device, event.change_bytes > 0, event.phase))
    return hash((*steps, *run.spans.items()))


class _Sizes:
    """Which sizes the model takes, and what steps of them do and need."""

    def __init__(self, trace: Callable[[int], TracedFit], needed_bytes: Callable[[TracedFit], int]) -> None:
        self._trace = trace
        self._needed_bytes = needed_bytes
        self.runs: dict[int, TracedFit] = {}  # of which the law is made
        self.needs: dict[int, int] = {}
        self.refusals: dict[int, str] = {}

    def add(self, size: int, traced: TracedFit) -> None:
        self.runs[size], self.needs[size] = traced, self._needed_bytes(traced)

    def takes(self, size: int) -> bool:
        """Whether the model takes a size."""
        if size and size not in self.needs and size not in self.refusals:
            traced, refusal = attempt(partial(self._trace, size))
            if traced is None:
                self.refusals[size] = refusal
            else:
                self.add(size, traced)
        return size in self.needs

    def law(self, sizes: Sequence[int]) -> SizeLaw | None:
        """Return the law of steps of these sizes, or of parts or multiples of the first, if the model takes them."""
        start = sizes[0]
        for points in (sizes, (start, start // 2, start // 4), (start, 2 * start, 3 * start)):
            points = points[: len(sizes)]
            if all(map(self.takes, points)):
                with suppress(ValueError):
                    return SizeLaw({point: self.runs[point] for point in points})
        return None

    def largest_below(self, refused: int) -> int | None:
        """Return the largest size below a refused one, maybe of multiples only, that is taken; ``None``: unknown."""
        taken, step = max((size for size in self.needs if size < refused), default=0), math.gcd(*self.needs)
        if not taken and refused > 1:
            return None
        probe = refused // step * step
        if taken < probe < refused:
            taken, refused = (probe, refused) if self.takes(probe) else (taken, probe)
        while refused - taken > 1:
            unit = step if refused - taken > step else 1
            middle = taken + max(1, (refused - taken) // 2 // unit) * unit
            taken, refused = (middle, refused) if self.takes(middle) else (taken, middle)
        return taken


def attempt(run: Callable[[], _Result]) -> tuple[_Result | None, str]:
    """Return what a run returns, or ``None`` and, in a line, why the model refuses it. Raises what is no refusal."""
    try:
        return run(), ""
    except UNKNOWN_VALUES:
        raise
    except Exception as error:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        is_own = str(frame.f_globals.get("__name__")).startswith(_OWN) and not isinstance(error, _DELIBERATE)
        if is_own or is_out_of_memory(error):
            raise
        line = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    return None, line if len(line) <= _MOST_LETTERS else line[: _MOST_LETTERS - 3] + "..."


def _bisect(fits: Callable[[int], bool], start: int) -> int:
    """Return about the largest number that fits, 0 if none does."""
    least, most = 0, start
    while most < _LARGEST and fits(most):
        least, most = most, 2 * most
    while most - least > max(1, least // _EXACT_UP_TO):
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


_HOST = "cpu"
_SHORTEST = 8
_COPIES = "Copies to the host are assumed to keep up with the computation; if they lag, the device needs more."
_NO_LIMITS = "No other batch is tried: the step ran on the CPU with this one. Estimate other sizes one by one."
_KERNEL_WIDTH = 64  # kernels of attention round lengths up: those that differ by multiples follow one law
Progress = Callable[[str, float], None]


def estimate_memory(  # noqa: PLR0913 - by name
    module: pl.LightningModule,
    batch: Any = None,
    *,
    device: str | torch.device | DeviceSpec,
    trainer: Mapping[str, Any] | None = None,
    datamodule: pl.LightningDataModule | None = None,
    devices: int = 1,
    num_nodes: int = 1,
    find_limits: bool = True,
    run_callbacks: RunCallbacks = (),
    on_progress: Progress | None = None,
) -> MemoryEstimate:
    """Estimate the peak memory of training on a device that you do not need to have.

    Two steps of ``Trainer.fit`` and one batch of validation run on fake tensors, with the module's own code, its
    optimizers, plugins, strategy, the callbacks of this package and those of Lightning that change the step
    (finetuning, pruning, weight averaging, accumulation). A model of CUDA's caching allocator turns live bytes into
    reserved bytes. Module, weights and Trainer arguments are copied, never changed, and nothing is logged.

    Args:
        module: Any LightningModule, with weights or on the ``meta`` device.
        batch: A batch as its loader returns it: any nest of tensors, of which only shapes and dtypes count. ``None``:
            the first batch of ``datamodule``, or of the module's own loader.
        device: Name of a GPU, such as ``"rtx4090"``; a :class:`lightning_vram.DeviceSpec`; a file of ``lightning-vram
            calibrate``; ``"cpu"`` for the step as it would run on this host.
        trainer: Arguments of the Trainer.
        datamodule: Provides the batch.
        devices: Number of devices per node.
        num_nodes: Number of nodes.
        find_limits: Whether to search for the largest batch and the longest sequence that fit, by a few more steps.
        run_callbacks: Your own callbacks of ``trainer`` that change the module or the step, by class or name. Other
            callbacks of yours, loggers, checkpoints and progress bars are skipped.
        on_progress: Called with the current stage as text and the finished share of the work, 0 to 1. ``None`` shows
            both on a terminal.

    Returns:
        The estimate for one rank, in bytes. ``print`` shows it as a table, ``plot`` draws it.

    Raises:
        TypeError: If an argument has a wrong type, or ``trainer`` has a name that ``Trainer`` does not take.
        ValueError: If the device is unknown, there is no batch, no optimizer steps, ``run_callbacks`` names a callback
            that ``trainer`` does not have, or the step reads values of tensors and cannot run on the host to find them.
        Exception: Any exception that the module raises in its step.

    Example:
        >>> from lightning_vram.demos import ByteGPT
        >>> tokens = torch.zeros(8, 257, dtype=torch.int64)
        >>> estimate_memory(ByteGPT(), tokens, device="rtx4090", find_limits=False).fits
        True
    """
    check_positive_int("estimate_memory(devices)", devices)
    check_positive_int("estimate_memory(num_nodes)", num_nodes)
    progress = on_progress or (lambda stage, done: None)
    spec = spec_of(device)
    if batch is None:
        progress("making a batch", 0.0)
        batch = first_batch(module, datamodule)
    run = FitRun(
        trainer_arguments=trainer or {},
        card=None if spec.name == _HOST else spec,
        num_ranks=devices * num_nodes,
        run_callbacks=check_run_callbacks("estimate_memory(run_callbacks)", run_callbacks),
    )
    progress("tracing the step", 0.0)
    estimator = Estimator(module, batch, spec, run)
    estimate = estimator.estimate()
    if find_limits and not estimator.has_limits:
        estimate = replace(estimate, notes=(*estimate.notes, _NO_LIMITS))
    elif find_limits:
        progress("searching for the largest batch", 0.3)
        largest = estimator.max_batch_size()
        progress("searching for the longest sequence", 0.7)
        longest = estimator.max_sequence_length()
        named = (("a larger batch", largest), ("a longer sequence", longest))
        notes = (f"The model raises with {name}: {limit.refusal}." for name, limit in named if limit.refusal)
        estimate = replace(
            estimate,
            max_batch_size=largest.size,
            batch_size_refusal=largest.refusal,
            max_sequence_length=longest.size,
            sequence_length_refusal=longest.refusal,
            notes=(*estimate.notes, *notes),
        )
    progress("done", 1.0)
    return estimate


class Estimator:
    """Estimates a run, and the same with other batches."""

    def __init__(self, module: pl.LightningModule, batch: Any, spec: DeviceSpec, run: FitRun) -> None:
        self._module = module
        self._batch = batch
        self._spec = spec
        self._run = run
        self._workspaces = None if run.card is None else workspaces_of(spec)
        self._is_traced = True
        try:
            self._traced = trace_fit(module, batch, run)
        except RuntimeError as error:  # among it what fake tensors cannot do; a mistake is one with real ones, too
            if "device" in str(error).partition("\n")[0] and run.card is not None:
                raise  # tensors on two devices: on the host they would be on one
            self._is_traced = False
            self._traced = run_whole(module, batch, run, error)
        self._micro_batch_size: int | None = None
        self._cut_until_it_fits()

    @property
    def has_limits(self) -> bool:
        """Whether runs with other batches can follow; what a step reads of its tensors was recorded with this one."""
        return self._is_traced and not self._run.reads.is_recorded

    def _cut_until_it_fits(self) -> None:
        """Do what callbacks that cut batches when memory runs out would find out: here it never does."""
        size, arguments = batch_size_of(self._batch) or 1, self._run.trainer_arguments
        callbacks = as_list(arguments.get("callbacks"))
        if not self._is_traced or not any(map(_cuts_when_full, callbacks)):
            return
        best_bytes = last_bytes = needed_bytes(self._traced, self._workspaces)
        while size > 1 and best_bytes > self._spec.memory_bytes:
            size = -(-size // 2)
            cut = [one.starting_with(size) if _cuts_when_full(one) else one for one in callbacks]
            run = replace(self._run, trainer_arguments={**arguments, "callbacks": cut})
            traced, _ = attempt(partial(trace_fit, self._module, self._batch, run))
            num_bytes = last_bytes if traced is None else needed_bytes(traced, self._workspaces)
            if traced is None or num_bytes == last_bytes:
                return  # batch norms refuse one sample; or it runs whole, or needs the most elsewhere
            last_bytes = num_bytes
            if num_bytes < best_bytes:
                best_bytes, self._micro_batch_size, self._run, self._traced = num_bytes, size, run, traced

    def max_batch_size(self) -> Limit:
        """Return the largest batch; of no known size if nothing can be said of others."""
        size, module, batch, run = batch_size_of(self._batch), self._module, self._batch, self._run
        if not size or not self.has_limits:
            return Limit()
        return self._largest(
            (size, size // 2 or 2), lambda new: trace_fit(module, with_batch_size(batch, size, new), run)
        )

    def max_sequence_length(self) -> Limit:
        """Return the longest sequence; of no known length if there is none."""
        length, run = sequence_length_of(self._batch), replace(self._run, has_values=True)
        if length is None or length < _SHORTEST or not self.has_limits:
            return Limit()

        def trace(new: int) -> TracedFit:
            nonlocal run
            batch = with_sequence_length(self._batch, length, new)
            try:
                return trace_fit(self._module, batch, run)
            except IndexError:
                if new > length or not run.has_values:
                    raise
                run = self._run  # the batch was made for its shapes: shorter ones have such values as well
                return trace_fit(self._module, batch, run)

        step = length // 4 // _KERNEL_WIDTH * _KERNEL_WIDTH or length // 4
        return self._largest((length, length - step, length - 2 * step), trace)

    def _largest(self, sizes: tuple[int, ...], trace: Callable[[int], TracedFit]) -> Limit:
        needed = partial(needed_bytes, workspaces=self._workspaces)
        return find_limit(trace, needed, self._spec.memory_bytes, sizes, self._traced)

    def estimate(self) -> MemoryEstimate:
        """Return the estimate of the batch, without limits."""
        workspaces, traced = self._workspaces, self._traced
        notes = [*(workspaces.notes if workspaces is not None else ()), *traced.notes]
        if traced.timeline.pinned_peak_bytes:
            notes.append(_COPIES)
        if any(isinstance(part, OptimizedModule) for part in self._module.modules()):
            notes.append("Compiled modules are traced uncompiled, and often need less than estimated.")
        if self._micro_batch_size is not None:
            notes.append(f"MicroBatching will run {self._micro_batch_size} samples at once.")
        return MemoryEstimate(
            device=self._spec,
            stages=estimate_stages(traced, workspaces),
            batch_size=batch_size_of(self._batch) or 0,
            world_size=self._run.num_ranks,
            context_bytes=workspaces.context_bytes if workspaces is not None else 0,
            notes=tuple(notes),
        )


def _cuts_when_full(callback: Any) -> bool:
    return hasattr(callback, "starting_with") and callback.size == "auto"


def spec_of(device: str | torch.device | DeviceSpec) -> DeviceSpec:
    """Return the description of a device that the user named; an unknown name is a ``ValueError``."""
    if isinstance(device, DeviceSpec):
        return device
    check_kind("estimate_memory(device)", device, str | torch.device, "a name or a DeviceSpec")
    return DeviceSpec(_HOST, available_host_bytes() or 1) if str(device) == _HOST else find_device(str(device))
