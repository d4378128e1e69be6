"""Count live tensor bytes exactly, on any machine: no GPU, no allocator, no sampling.

A dispatch mode sees the result of every operator, at 10-20 microseconds each, and a weak reference tells when each
storage dies. Not seen: workspaces inside a kernel, the allocator's rounding and fragmentation, and memory that no
operator returns (``torch.load``, a batch from a worker process, ``deepcopy``). A compiled callable runs uncompiled.
Under any dispatch mode some formulas round otherwise: a backward of ``prod`` and ``cumprod``, and ``linalg.svdvals``,
``eigvalsh``, ``cond``, ``lstsq`` and the nuclear norm without gradients; ``Custom(tensor)`` of a subclass is an error.
"""

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from typing_extensions import override

from lightning_vram.memory.device.accelerators import PhasePeaks, counts_peaks, stream_id
from lightning_vram.memory.device.measurement import Measurement
from lightning_vram.memory.storages import ByStorage, iterate_storages, iterate_tensors
from lightning_vram.memory.tracking.operator_listener import StorageSubscriber
from lightning_vram.memory.tracking.timeline import HOST, Allocation, Category, MemoryEvent, MemoryTimeline, Phase
from lightning_vram.private_names.dispatcher import detect_fake_mode
from lightning_vram.private_names.torch import current_graph_task_id, observe_forwards, tensors_in

_kept: WeakKeyDictionary[Optimizer, Callable[[], Iterable[Tensor]]] = WeakKeyDictionary()


def register_optimizer_tensors(optimizer: Optimizer, read: Callable[[], Iterable[Tensor]]) -> None:
    """Count tensors that are in no attribute of an optimizer, which ``read`` must not hold, such as fp32 weights."""
    _kept[optimizer] = read


def forget_optimizer_tensors(optimizer: Optimizer) -> None:
    """Undo :func:`register_optimizer_tensors`, if it was called."""
    _kept.pop(optimizer, None)


HELD = "held"
SCRATCH = " (scratch)"  # ends the name of an operator, for what it took in addition to its result


@dataclass(frozen=True)
class Moment:
    """When and where something happens in the tracked program."""

    phase: Phase  # the running phase
    is_building_graph: bool  # whether what is made now may be saved: in forward, recomputation, ``create_graph``


FORWARD = Moment(Phase.FORWARD, is_building_graph=True)
RECOMPUTATION = Moment(Phase.BACKWARD, is_building_graph=True)
BACKWARD = Moment(Phase.BACKWARD, is_building_graph=False)
OPTIMIZER_STEP = Moment(Phase.OPTIMIZER_STEP, is_building_graph=False)


@dataclass(slots=True)
class _Entry:
    op: str
    module: str
    born: Moment
    device: str
    num_bytes: int
    category: Category | None = None  # None until something says what it is for
    is_pinned: bool = False
    stream: int = 0

    def freeze(self) -> Allocation:
        category = self.category or Category.TEMPORARIES
        return Allocation(self.op, self.module, self.born.phase, category, self.device, self.is_pinned, self.stream)


class Ledger:
    """Entries of storages that are alive; what happened to those and others stays as events."""

    def __init__(self) -> None:
        self.moment = FORWARD
        self.module = ""
        self.is_in_reducer = False  # what DDP itself makes holds gradients
        self._entries: list[_Entry] = []
        self.events: list[MemoryEvent] = []
        self.backward_starts: list[int] = []  # indices into them
        self.live_bytes: Counter[str] = Counter()  # by device
        self._streams: dict[tuple[torch.device, int], int] = {}
        self.known: ByStorage[int] = ByStorage(self._free)  # numbers of entries; closed ones stay as events

    def update(self, storage: torch.UntypedStorage) -> None:
        """Note the present size of a known storage; unknown ones are left alone."""
        number = self.known.find_storage(storage)
        if number is not None:
            self._change(number, int(storage.nbytes()) - self._entries[number].num_bytes)

    def allocate(self, storage: torch.UntypedStorage, device: torch.device, op: str, module: str) -> int:
        """Note the birth of a storage, and return its number."""
        number = self._enter(device, op, module)
        self._entries[number].category = Category.GRADIENTS if self.is_in_reducer else None
        self._change(number, int(storage.nbytes()))
        self.known.note_storage(storage, number)  # an empty one too: it may grow
        return number

    def label(self, tensor: Tensor, category: Category, module: str) -> None:
        """Say what the storages of ``tensor`` are for; the first word counts. Unknown ones were held before."""
        for storage, device in iterate_storages(tensor):
            number = self.known.find_storage(storage)
            entry = self._entries[self.allocate(storage, device, HELD, module) if number is None else number]
            if entry.category is None:
                entry.category, entry.module = category, module

    def note_pinned(self, tensor: Tensor) -> None:
        """Note that a known host tensor is page-locked."""
        for storage, _ in iterate_storages(tensor):
            number = self.known.find_storage(storage)
            if number is not None:
                self._entries[number].is_pinned = True

    def note_scratch(self, op: str, device: torch.device, sizes: Iterable[int]) -> None:
        """Note what a kernel took in addition to its result, and gave back: blocks of ``sizes`` bytes."""
        first = len(self._entries)
        for num_bytes in sizes:
            self._change(self._enter(device, op + SCRATCH, self.module), num_bytes)
        for number in range(len(self._entries) - 1, first - 1, -1):
            self._change(number, -self._entries[number].num_bytes)

    def label_activations(self) -> None:
        """Say that what was made for a backward and is alive now is kept for it."""
        for number in self.known.values():
            entry = self._entries[number]
            if entry.category is None and entry.born.is_building_graph:
                entry.category = Category.ACTIVATIONS

    def start_backward(self) -> None:
        """Note that a backward begins with what is alive now."""
        self.backward_starts.append(len(self.events))

    def close(self) -> None:
        """Stop noting deaths."""
        self.known.clear()
        self.known = ByStorage()  # the other one knows this ledger: a cycle

    def timeline(self, device: str | None) -> MemoryTimeline:
        """Freeze what is written so far; ``None`` sums over the first device that is not the host, or the host."""
        return MemoryTimeline(
            allocations=tuple(entry.freeze() for entry in self._entries),
            events=tuple(self.events),
            backward_starts=tuple(self.backward_starts),
            device=device or min({entry.device for entry in self._entries} - {HOST}, default=HOST),
        )

    def _free(self, number: int) -> None:
        self._change(number, -self._entries[number].num_bytes)

    def _enter(self, device: torch.device, op: str, module: str) -> int:
        stream = stream_id(device)
        if stream:
            stream = self._streams.setdefault((device, stream), len(self._streams) + 1)
        self._entries.append(_Entry(op, module, self.moment, str(device), num_bytes=0, stream=stream))
        return len(self._entries) - 1

    def _change(self, number: int, change_bytes: int) -> None:
        if change_bytes:
            entry = self._entries[number]
            entry.num_bytes += change_bytes
            self.live_bytes[entry.device] += change_bytes
            self.events.append(MemoryEvent(number, change_bytes, self.moment.phase))


def label_all(ledger: Ledger, tensors: Iterable[tuple[str, Tensor | None]], category: Category) -> None:
    """Label named tensors; ``None`` is passed over."""
    for module, tensor in tensors:
        if tensor is not None:
            ledger.label(tensor, category, module)


_listeners: list[tuple[Callable[[nn.Module], None], Callable[[nn.Module], None]]] = []
_resizing: list[Ledger] = []


@contextmanager
def module_scope(module: nn.Module) -> Iterator[None]:
    """Name ``module`` as running inside the block: recomputation calls a forward without ``__call__`` and its hooks."""
    called = list(_listeners)
    for enter, _ in called:
        enter(module)
    try:
        yield
    finally:
        for _, leave in called:
            leave(module)


def follow_modules(stack: ExitStack, ledger: Ledger, root: nn.Module | None, on_forward: Callable[[], None]) -> None:
    """Keep the name of the innermost running module in the ledger."""
    names = {id(module): name for name, module in root.named_modules()} if root is not None else {}
    outer: list[tuple[nn.Module, str, bool]] = []

    def enter(module: nn.Module, *_: Any) -> None:
        on_forward()
        outer.append((module, ledger.module, ledger.is_in_reducer))
        ledger.module = names.get(id(module), ledger.module)
        ledger.is_in_reducer = isinstance(module, DistributedDataParallel)

    def leave(module: nn.Module, *_: Any) -> None:
        while outer:  # a module left by an exception that its hook did not see is skipped
            left, ledger.module, ledger.is_in_reducer = outer.pop()
            if left is module:
                return

    _listeners.append((enter, leave))
    stack.callback(_listeners.remove, (enter, leave))
    stack.callback(observe_forwards(enter, leave))


def follow_resizes(stack: ExitStack, ledger: Ledger) -> None:
    """Note ``UntypedStorage.resize_``, with which FSDP frees and fills parameters: it does not dispatch."""
    if not _resizing:
        torch.UntypedStorage.resize_ = _resize_and_note  # type: ignore[method-assign, assignment]
    _resizing.append(ledger)

    def stop() -> None:
        _resizing.remove(ledger)
        if not _resizing:
            del torch.UntypedStorage.resize_  # the one of its base shows again

    stack.callback(stop)


def _resize_and_note(storage: torch.UntypedStorage, size: int) -> Any:
    was_empty = storage.nbytes() == 0
    result = super(torch.UntypedStorage, storage).resize_(size)
    for ledger in _resizing:
        if was_empty and ledger.known.find_storage(storage) is None:
            ledger.allocate(storage, storage.device, "resize_", ledger.module)
        else:
            ledger.update(storage)
    return result


def track_memory(
    module: nn.Module | None = None, *, optimizers: Iterable[Optimizer] = (), inputs: Any = None
) -> "MemoryTracker":
    """Track live tensor bytes inside a ``with`` block, by category, phase and module.

    Tensors created inside the block always count. Earlier tensors count only if they are named here. Python's cyclic
    garbage collector is paused inside the block, so that the numbers are the same in each run; tensors that only a
    reference cycle keeps alive count as alive.

    Args:
        module: Module whose parameters, buffers and gradients count, and whose submodules label allocations. ``None``:
            no module.
        optimizers: Optimizers whose state counts. Other optimizers are found at their first step, and count from then
            on.
        inputs: Tensors in any nesting, such as a batch.

    Returns:
        The tracker. Its :attr:`~MemoryTracker.timeline` can be read inside and after the block.

    Raises:
        TypeError: If ``optimizers`` is a single optimizer instead of a list.
        RuntimeError: If the returned tracker is entered a second time.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(256, 256, bias=False)
        >>> with track_memory(layer) as tracker:
        ...     loss = layer(torch.ones(1, 256)).sum()
        ...     loss.backward()
        >>> tracker.timeline.peak_by_category[Category.PARAMETERS] == 256 * 256 * 4
        True
    """
    if isinstance(optimizers, Optimizer):
        kind = type(optimizers).__name__
        raise TypeError(f"track_memory(optimizers) must be a list of optimizers, got {kind}. Put one in a list: [...].")
    return MemoryTracker(module, tuple(optimizers), inputs)


class MemoryTracker(StorageSubscriber):
    """A running or finished measurement: see :func:`track_memory`."""

    takes_apart = True

    def __init__(self, module: nn.Module | None, optimizers: tuple[Optimizer, ...], inputs: Any) -> None:
        self.ledger = Ledger()
        super().__init__(self.ledger.known)
        self._module = module
        self._optimizers = list(optimizers)
        self._inputs = inputs
        self._step_depth = 0
        self._exit = ExitStack()
        self._is_fresh = True
        self._is_fake = False
        self._device: str | None = None

    @property
    def timeline(self) -> MemoryTimeline:
        """What was measured so far, frozen. Its device is that of the module's parameters, else an accelerator seen."""
        return self.ledger.timeline(self._device)

    def label_inputs(self, batch: Any) -> None:
        """Count the tensors of a batch, any nest of them, as inputs; also those made inside the block."""
        label_all(self.ledger, (("", leaf) for leaf in iterate_tensors(batch)), Category.INPUTS)

    def label_gradients(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors as gradients, such as those that they are gathered in."""
        label_all(self.ledger, (("", tensor) for tensor in tensors), Category.GRADIENTS)

    def __enter__(self) -> Self:
        if not self._is_fresh:
            raise RuntimeError("a memory tracker can be entered only once; call track_memory() again.")
        self._is_fresh = False
        if self._module is not None:
            parameter = next(self._module.parameters(), None)
            self._device = str(parameter.device) if parameter is not None else None
        self._label()
        self.label_inputs(self._inputs)
        with self._exit as stack:
            if gc.isenabled():
                gc.disable()
                stack.callback(gc.enable)
            follow_modules(stack, self.ledger, self._module, self._end_steps)
            follow_resizes(stack, self.ledger)
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            held = [*(self._module.parameters() if self._module is not None else ()), *iterate_tensors(self._inputs)]
            self._is_fake = detect_fake_mode(held) is not None
            super().__enter__()
            stack.push(super().__exit__)
            self._inputs = None  # the tracked program decides how long its batch lives
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._exit.close()
        self._label()
        if not self.ledger.backward_starts and torch.is_grad_enabled():
            self.ledger.label_activations()  # a forward alone: what lives now is what a backward would find
            self.ledger.start_backward()
        self.ledger.close()

    @override
    def before(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> None:
        if func is not torch.ops.aten.detach.default:
            self._observe()  # but hooks on saved tensors detach without gradients, in the middle of a recomputation

    @override
    def on_change(self, result: Any) -> None:
        for tensor in tensors_in(result):
            for storage, _ in iterate_storages(tensor):
                self.ledger.update(storage)

    @override
    def on_storage(self, func: Any, storage: torch.UntypedStorage, device: torch.device) -> None:
        # DTensor works shapes out on fake tensors of its own, once per operator.
        if self._is_fake or storage.device.type != "meta" or device.type == "meta":
            self.ledger.allocate(storage, device, str(func), self.ledger.module)

    def _observe(self) -> None:
        """Find out which phase the next operator belongs to, and what a change of phase tells."""
        before, now = self.ledger.moment, self._now()
        if now is before:
            return
        if now.phase is Phase.BACKWARD and before.is_building_graph:
            if before.phase is not Phase.BACKWARD:
                self._label()  # first what the forward put into parameters and buffers
            self.ledger.label_activations()
        if now.phase is Phase.BACKWARD and before.phase is not Phase.BACKWARD:
            self.ledger.start_backward()
        self.ledger.moment = now
        if before.phase is Phase.BACKWARD and now.phase is not Phase.BACKWARD:
            self._label()

    def _now(self) -> Moment:
        if current_graph_task_id() != -1:
            return RECOMPUTATION if torch.is_grad_enabled() else BACKWARD
        return OPTIMIZER_STEP if self._step_depth else FORWARD

    def _label(self) -> None:
        """Label what module and optimizers hold now; storages may have been swapped since the last time."""
        owners: dict[int, str] = {}
        if self._module is not None:
            named = [(name.rpartition(".")[0], parameter) for name, parameter in self._module.named_parameters()]
            owners = {id(parameter): owner for owner, parameter in named}
            label_all(self.ledger, named, Category.PARAMETERS)
            buffers = ((name.rpartition(".")[0], buffer) for name, buffer in self._module.named_buffers())
            label_all(self.ledger, buffers, Category.BUFFERS)
            label_all(self.ledger, ((owner, p.grad) for owner, p in named), Category.GRADIENTS)
        for optimizer in self._optimizers:
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                owner = owners.get(id(parameter), "")
                label_all(self.ledger, [(owner, parameter.grad)], Category.GRADIENTS)
                state = tensors_in(optimizer.state.get(parameter, {}))
                label_all(self.ledger, ((owner, leaf) for leaf in state), Category.OPTIMIZER_STATE)
            label_all(self.ledger, (("", tensor) for tensor in _kept.get(optimizer, tuple)()), Category.OPTIMIZER_STATE)

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not any(optimizer is known for known in self._optimizers):
            self._optimizers.append(optimizer)
        self._observe()
        self._label()
        self._step_depth += 1
        # A closure is a forward and a backward in the middle of the step: Lightning always steps this way.
        args = tuple(self._outside_of_step(arg) if callable(arg) and arg is not optimizer else arg for arg in args)
        if callable(kwargs.get("closure")):
            kwargs = {**kwargs, "closure": self._outside_of_step(kwargs["closure"])}
        return args, kwargs

    def _after_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._step_depth = max(0, self._step_depth - 1)
        self._label()

    def _end_steps(self) -> None:
        """Whatever runs a module is no optimizer step: one that ended in an exception has not said so."""
        self._step_depth = 0

    def _outside_of_step(self, closure: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            depth, self._step_depth = self._step_depth, 0
            try:
                return closure(*args, **kwargs)
            finally:
                self._step_depth = depth

        run.__wrapped__ = closure  # type: ignore[attr-defined]  # who asks whose it is
        return run


class MemoryProbe:
    """One reading: :meth:`start`, :meth:`switch` at changes of phase, then :meth:`finish` or :meth:`abort`."""

    def __init__(self, device: torch.device, peaks: PhasePeaks | None, *, track: bool) -> None:
        self._device = device
        self._peaks = peaks
        self.is_tracking = track
        self._exit = ExitStack()
        self.timeline: MemoryTimeline | None = None  # of what was tracked, at the end

    def start(self, module: nn.Module, optimizers: Iterable[Optimizer], inputs: Any) -> None:
        """Begin, with the forward."""
        self.switch(Phase.FORWARD)
        if self._peaks is not None:
            # Manual optimization runs several forwards in a batch: after a step it is the next one's turn.
            self._exit.callback(register_optimizer_step_post_hook(lambda *_: self.switch(Phase.FORWARD)).remove)
        if self.is_tracking:
            self._tracker = track_memory(module, optimizers=optimizers, inputs=inputs)
            self._exit.enter_context(self._tracker)

    def switch(self, phase: Phase) -> None:
        """Say that another phase begins. The tracker finds that out by itself."""
        if self._peaks is not None:
            self._peaks.switch(phase)

    def finish(self, stage: str, epoch: int, batch_idx: int, step: int) -> Measurement | None:
        """End, and say what was read; ``None`` if neither source was there."""
        self._exit.close()
        self.timeline = timeline = self._tracker.timeline if self.is_tracking else None
        begin = partial(Measurement, stage, epoch, batch_idx, step)
        if self._peaks is not None:
            now = self._peaks.read()
            measurement = begin(
                device=str(self._device),
                source="allocator",
                allocated_bytes=now.allocated_bytes,
                peak_allocated_bytes=self._peaks.peak_allocated_bytes,
                reserved_bytes=now.reserved_bytes,
                peak_reserved_bytes=self._peaks.peak_reserved_bytes,
                peak_by_phase={str(phase): peak for phase, peak in self._peaks.by_phase.items()},
            )
            if timeline is None:
                return measurement
            if not counts_peaks(self._device):  # those of the allocator are only the most that was read
                peak_bytes = max(timeline.peak_bytes, measurement.peak_allocated_bytes)
                phases = {str(phase): peak for phase, peak in timeline.peak_by_phase.items()}
                measurement = replace(
                    measurement, source="tracker", peak_allocated_bytes=peak_bytes, peak_by_phase=phases
                )
            return measurement.with_timeline(timeline)
        if timeline is None:
            return None
        return begin(
            device=timeline.device,
            source="tracker",
            allocated_bytes=timeline.live_bytes,
            peak_allocated_bytes=timeline.peak_bytes,
            peak_by_phase={str(phase): peak for phase, peak in timeline.peak_by_phase.items()},
        ).with_timeline(timeline)

    def abort(self) -> None:
        """End without a reading: the batch did not."""
        self._exit.close()
