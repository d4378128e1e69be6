"""The tracker's ledger: which storages are alive, when each was allocated, resized and freed, and what it is for."""

import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_vram.memory.device.accelerators import stream_id
from lightning_vram.memory.tracking.storages import iterate_storages
from lightning_vram.memory.tracking.timeline import HOST, Allocation, Category, MemoryEvent, MemoryTimeline, Phase
from lightning_vram.private_names.torch.tensors import storage_key

HELD = "held"
SCRATCH = " (scratch)"  # ends the name of an operator, for what it took beside its result


@dataclass(frozen=True)
class Moment:
    """When and where something happens in the tracked program."""

    phase: Phase  # the running phase
    # whether what is made now may be kept for a later backward: in a forward, in the recomputation of one, and in a
    # backward with ``create_graph``
    is_building_graph: bool


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


class Ledger:
    """Open accounts by storage; closed ones stay as events.

    A storage is known by the address of its C++ object. Addresses are used again after death, so each account holds
    a weak reference whose callback closes it the moment the storage dies.
    """

    def __init__(self) -> None:
        self.moment = FORWARD
        self.module = ""
        self.is_in_reducer = False  # what DDP itself makes holds gradients
        self._entries: list[_Entry] = []
        self.events: list[MemoryEvent] = []
        self.backward_starts: list[int] = []  # indices into them
        self.live_bytes: Counter[str] = Counter()  # by device
        self._streams: dict[tuple[torch.device, int], int] = {}
        self._open: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}

    def add(self, tensor: Tensor, op: str) -> None:
        """Note what an operator returned: a new storage is born, a known one may have changed its size."""
        for storage, device in iterate_storages(tensor):
            self.add_storage(storage, device, op)

    def add_storage(self, storage: torch.UntypedStorage, device: torch.device, op: str) -> None:
        """Note the present size of a storage, which is born now if it is unknown."""
        if storage_key(storage) in self._open:
            self.update_storage(storage)
        else:
            self._birth(storage, device, op, self.module)

    def update(self, tensor: Tensor) -> None:
        """Note the present size of what is known of ``tensor``."""
        for storage, _ in iterate_storages(tensor):
            self.update_storage(storage)

    def update_storage(self, storage: torch.UntypedStorage) -> None:
        """Note the present size of a known storage; unknown ones are left alone."""
        account = self._open.get(storage_key(storage))
        if account is not None:
            number = account[1]
            self._change(number, int(storage.nbytes()) - self._entries[number].num_bytes)

    def label(self, tensor: Tensor, category: Category, module: str) -> None:
        """Say what the storages of ``tensor`` are for; the first word counts. Unknown ones were held before."""
        for storage, device in iterate_storages(tensor):
            if storage_key(storage) not in self._open:
                self._birth(storage, device, HELD, module)
            account = self._open.get(storage_key(storage))
            if account is not None and self._entries[account[1]].category is None:
                entry = self._entries[account[1]]
                entry.category, entry.module = category, module

    def note_pinned(self, tensor: Tensor) -> None:
        """Note that a known host tensor is page-locked."""
        for storage, _ in iterate_storages(tensor):
            account = self._open.get(storage_key(storage))
            if account is not None:
                self._entries[account[1]].is_pinned = True

    def note_scratch(self, op: str, device: torch.device, sizes: Iterable[int]) -> None:
        """Note what a kernel took beside its result, and gave back: blocks of ``sizes`` bytes."""
        first = len(self._entries)
        for num_bytes in sizes:
            self._change(self._enter(device, op + SCRATCH, self.module), num_bytes)
        for number in range(len(self._entries) - 1, first - 1, -1):
            self._change(number, -self._entries[number].num_bytes)

    def label_activations(self) -> None:
        """Say that what was made for a backward and is alive now is kept for it."""
        for _, number in self._open.values():
            entry = self._entries[number]
            if entry.category is None and entry.born.is_building_graph:
                entry.category = Category.ACTIVATIONS

    def start_backward(self) -> None:
        """Note that a backward begins with what is alive now."""
        self.backward_starts.append(len(self.events))

    def close(self) -> None:
        """Stop noting deaths."""
        self._open.clear()  # with their references go the callbacks

    def timeline(self, device: str | None) -> MemoryTimeline:
        """Freeze what is written so far; ``None`` sums over the first device that is not the host, or the host."""
        devices = sorted({entry.device for entry in self._entries} - {HOST})
        return MemoryTimeline(
            allocations=tuple(_freeze(entry) for entry in self._entries),
            events=tuple(self.events),
            backward_starts=tuple(self.backward_starts),
            device=device or next(iter(devices), HOST),
        )

    def _birth(self, storage: torch.UntypedStorage, device: torch.device, op: str, module: str) -> None:
        key, number = storage_key(storage), self._enter(device, op, module)  # an empty one may grow
        self._entries[number].category = Category.GRADIENTS if self.is_in_reducer else None
        self._change(number, int(storage.nbytes()))

        def bury(reference: weakref.ref[torch.UntypedStorage]) -> None:
            account = self._open.get(key)
            if account is not None and account[0] is reference:
                del self._open[key]
                self._change(number, -self._entries[number].num_bytes)

        self._open[key] = (weakref.ref(storage, bury), number)

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


def _freeze(entry: _Entry) -> Allocation:
    return Allocation(
        op=entry.op,
        module=entry.module,
        phase=entry.born.phase,
        category=entry.category or Category.TEMPORARIES,
        device=entry.device,
        is_pinned=entry.is_pinned,
        stream=entry.stream,
    )


def label_all(ledger: Ledger, tensors: Iterable[tuple[str, Tensor | None]], category: Category) -> None:
    """Label named tensors; ``None`` is passed over."""
    for module, tensor in tensors:
        if tensor is not None:
            ledger.label(tensor, category, module)
