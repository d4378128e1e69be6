"""Offloaded storages, one item each: where the bytes are, and which saved tensors still need them."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_vram.core.hooks import StoredTensor
from lightning_vram.core.host.memory import OffloadError, hidden_from_modes
from lightning_vram.core.host.transfers import H2DCopy
from lightning_vram.core.tensors.properties import alias, version_counter
from lightning_vram.private_names.dispatcher import FakeTensor, neg_view
from lightning_vram.private_names.torch import current_graph_task_id, num_writes
from lightning_vram.techniques.activation_offload.places import HostCopy, Place

ALIGNED_BYTES = 256
"""Kernels choose by the alignment of addresses. Those of copies are the originals', modulo this."""


class Geometry:
    """How a tensor lies in its memory."""

    __slots__ = ("is_conj", "is_neg", "offset", "shape", "strides")

    def __init__(self, tensor: Tensor, offset: int) -> None:
        self.shape, self.strides, self.offset = tensor.shape, tensor.stride(), offset
        self.is_conj, self.is_neg = tensor.is_conj(), tensor.is_neg()


def find_span(tensor: Tensor) -> tuple[int, int]:
    """Return the first element and the number of elements to send: of all its memory if it covers half of that.

    Else they begin at an aligned address, up to 255 bytes below the tensor.
    """
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    total, remainder = divmod(tensor.untyped_storage().nbytes(), tensor.dtype.itemsize)
    if not remainder and 2 * length >= total:
        return 0, total
    offset = int(tensor.storage_offset())
    below = offset % (ALIGNED_BYTES // tensor.dtype.itemsize)
    return offset - below, length + below


def to_flat(tensor: Tensor, start: int, length: int) -> Tensor:
    """Return ``length`` elements of the memory of an alias from ``start`` on, as they lie there."""
    with hidden_from_modes(tensor):
        if tensor.is_neg():
            tensor = neg_view(tensor)
        if tensor.is_conj():
            tensor = tensor.conj()
        return tensor.as_strided((length,), (1,), start)


def as_bytes(flat: Tensor) -> Tensor:
    """Return the bytes of a flat tensor."""
    with hidden_from_modes(flat):
        return flat.view(torch.uint8)


def to_view(flat: Tensor, dtype: torch.dtype, geometry: Geometry) -> Tensor:
    """Return the tensor that ``geometry`` tells of, on the bytes of ``flat``."""
    with hidden_from_modes(flat):
        remainder = flat.numel() % dtype.itemsize
        typed = (flat.narrow(0, 0, flat.numel() - remainder) if remainder else flat).view(dtype)
        view = typed.as_strided(geometry.shape, geometry.strides, typed.storage_offset() + geometry.offset)
        if geometry.is_conj:
            view = view.conj()
        return neg_view(view) if geometry.is_neg else view


_MAX_KINDS = 256  # remembered; batches may have any length
_FEWEST_TO_PRUNE = 64


class _Saved(Protocol):
    number: int
    num_bytes: int


class Run:
    """What one forward saved, in order, and how much of it is on the device; expected is last time's, or 0."""

    __slots__ = ("_prune_at", "expected_bytes", "items", "largest_bytes", "resident_bytes", "saved_bytes")

    def __init__(self, expected_bytes: int = 0, largest_bytes: int = 0) -> None:
        self.expected_bytes = expected_bytes
        self.largest_bytes = largest_bytes
        self.saved_bytes = 0
        self.resident_bytes = 0  # on the device and not given back to autograd yet
        self.items: list[weakref.ref[Any]] = []
        self._prune_at = _FEWEST_TO_PRUNE

    def append(self, item: _Saved) -> None:
        """Note that ``item`` is saved, and number it."""
        item.number = len(self.items)
        self.items.append(weakref.ref(item))
        if len(self.items) >= self._prune_at:
            self._prune()

    def _prune(self) -> None:
        """Forget the dead if they are the most: of forwards, say, that one loss after the other dropped unused."""
        alive = [item for reference in self.items if (item := reference()) is not None]
        if 2 * len(alive) <= len(self.items):
            for number, item in enumerate(alive):
                item.number = number
            self.items = [weakref.ref(item) for item in alive]
            self.saved_bytes = sum(item.num_bytes for item in alive)
        self._prune_at = max(_FEWEST_TO_PRUNE, 2 * len(self.items))


class ForwardHistory:
    """Follows a program from forward to forward.

    A forward begins when the program is entered, and with what is saved after a backward asked for something. Two are
    of a kind if both were the n-th since the program was entered, and what they saved first has one size.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], tuple[int, int]] = {}  # total and largest bytes by kind, latest kind last
        self._run: Run | None = None
        self._kind = (0, 0)
        self._num_forwards = 0

    def start(self) -> None:
        """The program is entered."""
        self._run = None
        self._num_forwards = 0

    def end_forward(self) -> None:
        """A backward asked for something."""
        self._run = None

    def add(self, num_bytes: int) -> tuple[Run, int]:
        """Note that something is saved; return the run it belongs to, and the bytes that were saved in it before."""
        run = self._run
        if run is None:
            self._kind = (self._num_forwards, num_bytes)
            self._num_forwards += 1
            run = self._run = Run(*self._last.pop(self._kind, (0, 0)))
            if len(self._last) >= _MAX_KINDS:
                del self._last[next(iter(self._last))]
        position = run.saved_bytes
        run.saved_bytes += num_bytes
        run.largest_bytes = max(run.largest_bytes, num_bytes)
        self._last[self._kind] = run.saved_bytes, run.largest_bytes
        return run, position


_LOOK_AHEAD = 64  # items that are looked at for one that may be fetched


class _BorrowedMemory(NamedTuple):
    """What a copy was when it was first handed over."""

    counter: Tensor
    version: int
    graph_task: int

    @property
    def is_intact(self) -> bool:
        return num_writes(self.counter) == self.version


class OffloadedItem:
    """Bytes of one storage: sent away, or kept because they are needed again at once.

    Its copy on the device is held until each handle was asked once; then it lives as long as somebody uses it, and
    serves that backward. Whoever got it may have written to it, or made a gradient of it: then it is fetched again.
    Handles die in any thread and at any moment: what that does to the counts below takes no lock. The worst that can
    come of it is a copy that is held too long, or fetched again.
    """

    __slots__ = (
        *("__weakref__", "_arrival", "_counted_bytes", "_device", "_lent", "_load", "_loan", "_num_handles"),
        *("_num_waiting", "_packed_dtype", "_place", "_snapshot", "num_bytes", "number", "host_copy", "run"),
    )

    def __init__(self, run: Run, place: Place, num_bytes: int, packed_dtype: torch.dtype | None) -> None:
        self.run = run
        self.number = 0
        self.num_bytes = num_bytes
        self.host_copy: HostCopy | None = None
        self._place = place
        self._packed_dtype = packed_dtype  # of a tensor that travels in bfloat16
        self._arrival: H2DCopy | None = None
        self._device: Tensor | None = None
        self._lent: weakref.ref[torch.UntypedStorage] | None = None
        self._loan: _BorrowedMemory | None = None
        self._snapshot: tuple[Tensor, int] | None = None
        self._load = self._num_handles = self._num_waiting = self._counted_bytes = 0
        run.append(self)

    def __del__(self) -> None:
        self._uncount()

    @property
    def is_here(self) -> bool:
        """Whether its bytes are on the device, or on their way."""
        if self._device is not None:
            return self._loan is None or self._loan.is_intact
        return self._in_flight() is not None or self._lent_storage() is not None

    def keep(self, flat: Tensor, window_bytes: int) -> None:
        """Leave the bytes where they are; copies in flight and what is kept share the window."""
        self._hold(flat, None)
        self._place.copies.settle(window_bytes - self.run.resident_bytes)

    def send(self, flat: Tensor, tensor: Tensor, window_bytes: int) -> None:
        """Send the bytes of ``tensor`` away."""
        self.host_copy = self._place.put(flat, window_bytes)
        if self.host_copy.departure.source is not None:
            self._snapshot = version_counter(tensor), num_writes(tensor)

    def still_holds(self, tensor: Tensor, start_bytes: int) -> bool:
        """Whether what was sent is what the memory of ``tensor`` holds from ``start_bytes`` on.

        There are writes that no version tells of: by way of ``.data``, by NumPy. On the host they are looked for.
        """
        if self.host_copy is None or type(tensor) is FakeTensor or tensor.device.type != "cpu":
            return True
        with hidden_from_modes(tensor):
            flat = self._place.wrap(tensor.untyped_storage()).narrow(0, start_bytes, self.num_bytes)
            if self._packed_dtype is not None:
                flat = flat.view(self._packed_dtype).to(torch.bfloat16).view(torch.uint8)
            sent = torch.empty_like(flat)
            self.host_copy.fetch(sent, self._place.copies.mark()).wait(sent)
            return torch.equal(sent, flat)

    def fetch(self) -> Tensor:
        """Begin to bring the bytes back; returns them, see :meth:`hand_over`."""
        assert self.host_copy is not None
        packed = self._packed_dtype
        target = self._place.make(self.num_bytes if packed is None else self.num_bytes // packed.itemsize * 2)
        self._hold(target, self.host_copy.fetch(target, self._place.copies.mark()))
        return target

    def find(self) -> Tensor | None:
        """Return the bytes, flat, perhaps on their way still, see :meth:`hand_over`; ``None`` if they are away."""
        flat = self._device
        if flat is not None:
            return flat if self._loan is None or self._loan.is_intact else None
        source = self._in_flight()
        return source if source is not None else self._find_lent()

    def hand_over(self, flat: Tensor) -> Tensor:
        """Return what was found or fetched, for what is queued on the current stream from now on."""
        if self._arrival is None:  # it never went
            return flat
        self._arrival.wait(flat)
        if flat.numel() < self.num_bytes and self._packed_dtype is not None:
            packed, flat = flat, flat.view(torch.bfloat16).to(self._packed_dtype).view(torch.uint8)
            if self._device is packed:
                self._device = flat
            self._arrival = self._place.copies.note_made(flat)
        if self._loan is None:
            self._loan = _BorrowedMemory(version_counter(flat), num_writes(flat), current_graph_task_id())
        return flat

    def note_handle(self) -> int:
        """Count one more handle; returns what it has been given so far: nothing."""
        self._num_handles += 1
        if self._device is not None:
            self._num_waiting += 1
        return self._load - 1

    def note_given(self, load: int) -> int:
        """Count that a handle was asked, which was last asked at ``load``; returns the present load."""
        if load != self._load:
            self._num_waiting -= 1
            if self._num_waiting <= 0:
                self._let_go()
        return self._load

    def forget_handle(self, load: int) -> None:
        """Count one handle less."""
        self._num_handles -= 1
        if self._device is not None:
            self.note_given(load)

    def fetch_ahead(self, window_bytes: int) -> None:
        """Begin to fetch what was saved before this, which is about to be handed over, as far as the window reaches."""
        items = self.run.items
        room = window_bytes - self.run.resident_bytes + self._counted_bytes
        for number in range(self.number - 1, max(-1, self.number - 1 - _LOOK_AHEAD), -1):
            earlier = items[number]()
            if earlier is None or earlier.is_here:
                continue
            if earlier.num_bytes > room:
                return
            try:
                earlier.fetch()
            except (torch.OutOfMemoryError, OffloadError):  # whoever needs it now may still have it
                return
            room -= earlier.num_bytes

    def release_memory(self, window_bytes: int) -> None:
        """Pass over what was saved after this and nobody asked for, if it fills the window.

        The backward took another way: of two losses of one forward only the first, say.
        """
        run = self.run
        if run.resident_bytes and run.resident_bytes + self.num_bytes > window_bytes:
            for reference in run.items[self.number + 1 :]:
                later = reference()
                if later is not None:
                    later._pass_over()

    def _pass_over(self) -> None:
        """Drop a copy nobody asked for, or at least do not count it."""
        if self.host_copy is not None and self._num_waiting == self._num_handles:
            self._device = self._arrival = self._loan = None
        self._uncount()

    def _uncount(self) -> None:
        """Count it no longer among what waits on the device."""
        self.run.resident_bytes -= self._counted_bytes
        self._counted_bytes = 0

    def _hold(self, flat: Tensor, arrival: H2DCopy | None) -> None:
        self._uncount()  # what it holds already, if that was written to
        self._device, self._arrival, self._loan, self._lent = flat, arrival, None, None
        self._load += 1
        self._num_waiting = self._num_handles
        self._counted_bytes = self.num_bytes
        self.run.resident_bytes += self.num_bytes

    def _let_go(self) -> None:
        self._uncount()
        flat = self._device
        if self.host_copy is None or flat is None:
            return
        self._lent = weakref.ref(flat.untyped_storage())
        self._device = None

    def _find_lent(self) -> Tensor | None:
        storage, loan = self._lent_storage(), self._loan
        if storage is None or loan is None:
            return None
        flat = alias(loan.counter)  # which is told of writes to this one, too
        flat.data = self._place.wrap(storage)
        return flat

    def _lent_storage(self) -> torch.UntypedStorage | None:
        loan = self._loan
        if self._lent is None or loan is None or not loan.is_intact:
            return None
        # After that backward it may be a gradient, to which writes are common that no version tells of.
        return self._lent() if loan.graph_task == current_graph_task_id() else None

    def _in_flight(self) -> Tensor | None:
        """Return the very memory it was copied from, as long as a copy in flight holds it and nobody wrote to it."""
        if self._snapshot is None or self.host_copy is None or self._packed_dtype is not None:
            return None
        source = self.host_copy.departure.source
        counter, version = self._snapshot
        return source if num_writes(counter) == version else None


_Bring = Callable[[OffloadedItem, int], tuple[Tensor, int]]
"""Gets an item and the load at which a handle was last asked; returns the bytes and the load now."""


class OffloadHandle(StoredTensor):
    """A tensor that was offloaded: how it lies in the bytes of its item, which it may share with others."""

    __slots__ = ("_bring", "_dtype", "_geometry", "_load", "item")

    def __init__(self, bring: _Bring, item: OffloadedItem, tensor: Tensor, offset: int) -> None:
        self.item = item
        self._load = item.note_handle()
        self._bring = bring
        self._dtype = tensor.dtype
        self._geometry = Geometry(tensor, offset)  # offset in elements, from the first byte of the item

    def __del__(self) -> None:
        self.item.forget_handle(self._load)

    @property
    def num_bytes(self) -> int:  # noqa: D102
        return 0 if self.item.host_copy is not None else self.item.num_bytes

    def before_write(self) -> None:  # noqa: D102
        if self.item.host_copy is not None:
            self.item.host_copy.departure.precede()

    def give(self) -> Tensor:  # noqa: D102
        flat, self._load = self._bring(self.item, self._load)
        return to_view(flat, self._dtype, self._geometry)


class LateHandle(StoredTensor):
    """Holds a tensor until its operator has finished, then what ``take`` returns for it (``None``: it stays)."""

    __slots__ = ("_take", "_taken", "_tensor")

    def __init__(self, tensor: Tensor, take: Callable[[Tensor], StoredTensor | None]) -> None:
        self._tensor: Tensor | None = alias(tensor)
        self._take: Callable[[Tensor], StoredTensor | None] | None = take
        self._taken: StoredTensor | None = None

    def finish(self) -> None:
        """Take it over now: the operator that saved it is through."""
        if self._take is not None and self._tensor is not None:
            take, self._take = self._take, None
            self._taken = take(self._tensor)
            if self._taken is not None:
                self._tensor = None

    @property
    def is_snapshot(self) -> bool:  # noqa: D102
        return self._taken is not None

    @property
    def num_bytes(self) -> int:  # noqa: D102
        return self._tensor.nbytes if self._tensor is not None else self._whole.num_bytes

    def before_write(self) -> None:  # noqa: D102
        self.finish()
        if self._taken is not None:
            self._taken.before_write()

    def give(self) -> Tensor:  # noqa: D102
        return self._tensor if self._tensor is not None else self._whole.give()

    @property
    def _whole(self) -> StoredTensor:
        assert self._taken is not None
        return self._taken
