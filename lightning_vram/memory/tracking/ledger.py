"""The tracker's ledger: which storages are alive, when each was allocated, resized and freed, and what it is for."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_vram.memory.device.accelerators import stream_id
from lightning_vram.memory.storages import ByStorage, iterate_storages
from lightning_vram.memory.tracking.timeline import HOST, Allocation, Category, MemoryEvent, MemoryTimeline, Phase
from lightning_vram.private_names.torch import observe_forwards

_kept: WeakKeyDictionary[Optimizer, Callable[[], Iterable[Tensor]]] = WeakKeyDictionary()


def register_optimizer_tensors(optimizer: Optimizer, read: Callable[[], Iterable[Tensor]]) -> None:
    """Count tensors that are in no attribute of an optimizer, which ``read`` must not hold, such as fp32 weights."""
    _kept[optimizer] = read


def forget_optimizer_tensors(optimizer: Optimizer) -> None:
    """Undo :func:`register_optimizer_tensors`, if it was called."""
    _kept.pop(optimizer, None)


def optimizer_tensors(optimizer: Optimizer) -> Iterable[Tensor]:
    """Return the tensors that were registered."""
    return _kept.get(optimizer, tuple)()


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

    def update(self, tensor: Tensor) -> None:
        """Note the present size of what is known of ``tensor``."""
        for storage, _ in iterate_storages(tensor):
            self.update_storage(storage)

    def update_storage(self, storage: torch.UntypedStorage) -> None:
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
        devices = sorted({entry.device for entry in self._entries} - {HOST})
        return MemoryTimeline(
            allocations=tuple(entry.freeze() for entry in self._entries),
            events=tuple(self.events),
            backward_starts=tuple(self.backward_starts),
            device=device or next(iter(devices), HOST),
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
            ledger.update_storage(storage)
    return result
