"""Offloaded storages, one item each: where the bytes are, in host memory or a file, and who still needs them."""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_vram.core.host.disk import DiskRing
from lightning_vram.core.host.memory import HostArena, OffloadError, hidden_from_modes
from lightning_vram.core.host.transfers import D2HCopy, H2DCopy, make_copies
from lightning_vram.core.tensors.properties import alias
from lightning_vram.private_names.dispatcher import FakeTensor
from lightning_vram.private_names.torch import current_graph_task_id, num_writes


class HostCopy(NamedTuple):
    """Bytes that were sent away; they are gone with this object."""

    departure: D2HCopy
    fetch: Callable[[Tensor, Any], H2DCopy]
    """Begins to copy them into a tensor that was made before some moment."""


class Place:
    """Takes flat bytes of one device and gives them back."""

    def __init__(self, arena: HostArena | None, ring: DiskRing | None, like: Tensor) -> None:
        # Of this device only: copies may still read what lay there before, and copies of two devices do not wait for
        # each other. ``None`` if there is a disk.
        self.arena = arena
        self._ring = ring  # ``None`` for fake tensors, too, which would be written to the file
        self.copies = make_copies(like)
        with hidden_from_modes(like):
            self._like = like.new_empty(0, dtype=torch.uint8)

    def put(self, source: Tensor, window_bytes: int) -> HostCopy:
        """Send bytes away; at most ``window_bytes`` of the device are held for copies in flight."""
        copies, like = self.copies, self._like
        if self.arena is not None:
            block = self.arena.take(source.numel())
            departure = copies.send(source, block.pieces, window_bytes)
            return HostCopy(departure, lambda target, moment: copies.fetch(block.pieces, target, moment))
        if self._ring is None:
            return HostCopy(D2HCopy(), lambda target, moment: H2DCopy())
        written = self._ring.write(source, copies, window_bytes)  # in parts: no departure stands for all
        return HostCopy(D2HCopy(), lambda target, moment: written.read(target, lambda: make_copies(like), moment))

    def make(self, num_bytes: int) -> Tensor:
        """Return memory on the device, visible to trackers of memory."""
        return self._like.new_empty(num_bytes)


ALIGNED_BYTES = 256
"""Kernels choose by the alignment of addresses. Those of copies are the originals', modulo this."""

_MAX_KINDS = 256  # remembered; batches may have any length
_LOOK_AHEAD = 64  # items that are looked at for one that may be fetched


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


def to_bytes(tensor: Tensor, start: int, length: int) -> Tensor:
    """Return the bytes of ``length`` elements of the memory of an alias from ``start`` on, as they lie there."""
    with hidden_from_modes(tensor):
        return tensor.as_strided((length,), (1,), start).view(torch.uint8)


class Run:
    """What one forward saved, in order, and how much of it is on the device; expected is what the last one saved."""

    __slots__ = ("expected_bytes", "is_open", "items", "largest_bytes", "num_items", "resident_bytes", "saved_bytes")

    def __init__(self, last: "Run | None") -> None:
        self.num_items = 0
        self.saved_bytes: int = 0
        self.expected_bytes: int = last.saved_bytes if last is not None else 0
        self.largest_bytes: int = last.largest_bytes if last is not None else 0
        self.is_open = True
        self.resident_bytes = 0  # on the device and not given back to autograd yet
        self.items: dict[int, weakref.ref[OffloadedItem]] = {}  # those alive, by number


class ForwardHistory:
    """Follows a program from forward to forward.

    A forward begins when the program is entered, and with what is saved after a backward asked for something. Two are
    of a kind if both were the n-th since the program was entered, and what they saved first has one size.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], Run] = {}  # by kind, latest kind last
        self._run: Run | None = None
        self._num_forwards = 0

    def start(self) -> None:
        """The program is entered."""
        self.end_forward()
        self._num_forwards = 0

    def end_forward(self) -> None:
        """A backward asked for something, or the program ends."""
        if self._run is not None:
            self._run.is_open = False
            self._run = None

    def add(self, num_bytes: int) -> tuple[Run, int]:
        """Note that something is saved; return the run it belongs to, and the bytes that were saved in it before."""
        run = self._run
        if run is None:
            kind = (self._num_forwards, num_bytes)
            self._num_forwards += 1
            run = self._run = Run(self._last.pop(kind, None))
            self._last[kind] = run
            if len(self._last) > _MAX_KINDS:
                del self._last[next(iter(self._last))]
        position = run.saved_bytes
        run.saved_bytes += num_bytes
        run.largest_bytes = max(run.largest_bytes, num_bytes)
        return run, position


class OffloadedItem:
    """Bytes of one storage. They stay until they are sent, if ever.

    A copy that came back is held until each handle was given it. Who was given it may have written to it: then it is
    fetched again. Handles die in any thread and at any moment: what that does to the sets below takes no lock. The
    worst that can come of it is a copy that is held too long, or fetched again.
    """

    __slots__ = (
        *("__weakref__", "_arrival", "_counted_bytes", "_device", "_given_in", "_handles", "_packed_dtype", "_place"),
        *("_version", "_waiting", "host_copy", "num_bytes", "number", "run"),
    )

    def __init__(self, run: Run, place: Place, flat: Tensor, packed_dtype: torch.dtype | None) -> None:
        self.run = run
        self.number = run.num_items
        self._counted_bytes = 0
        run.num_items += 1
        run.items[self.number] = weakref.ref(self)
        self.num_bytes = flat.numel()
        self.host_copy: HostCopy | None = None
        self._device: Tensor | None = None
        self._arrival: H2DCopy | None = None
        self._version: int | None = None  # of a copy on the device, when it was first given
        self._place = place
        self._packed_dtype = packed_dtype  # of a tensor that travels in bfloat16
        self._handles: set[int] = set()
        self._given_in: int | None = None  # the backward in which all were given it
        self._hold(flat, None)

    def __del__(self) -> None:
        self._uncount()
        self.run.items.pop(self.number, None)
        if self.run.is_open:  # of forwards, say, that one loss after the other dropped unused
            self.run.saved_bytes -= self.num_bytes

    @property
    def is_here(self) -> bool:
        """Whether its bytes are on the device, or on their way."""
        flat = self._device
        return flat is not None and (self._version is None or self._version == num_writes(flat))

    def send(self, window_bytes: int) -> None:
        """Send the bytes away."""
        assert self._device is not None
        self.host_copy = self._place.put(self._pack(self._device), window_bytes)
        self._device = None
        self._uncount()

    def still_holds(self, tensor: Tensor, start: int) -> bool:
        """Whether what was sent is what the memory of ``tensor`` holds from its element ``start`` on.

        There are writes that no version tells of: by way of ``.data``, by NumPy. On the host they are looked for.
        """
        if self.host_copy is None or type(tensor) is FakeTensor or tensor.device.type != "cpu":
            return True
        flat = to_bytes(alias(tensor), start, self.num_bytes // tensor.dtype.itemsize)
        with hidden_from_modes(tensor):
            flat, sent = self._pack(flat), self._make()
            self.host_copy.fetch(sent, self._place.copies.mark()).wait(sent)
            return torch.equal(sent[: flat.numel()], flat)

    def fetch(self) -> Tensor:
        """Begin to bring the bytes back; return where they will be."""
        assert self.host_copy is not None
        target = self._make()
        self._hold(target, self.host_copy.fetch(target, self._place.copies.mark()))
        return target

    def give(self, handle: int, window_bytes: int) -> Tensor:
        """Return the bytes for what is queued on the current stream from now on. Fetch ahead what was saved before."""
        flat = self._device if self.is_here else None
        if flat is None:
            self._release_memory(window_bytes)
            flat = self.fetch()
        self._fetch_ahead(window_bytes)
        flat = self._hand_over(flat)
        self._note_given(handle)
        return flat

    def note_handle(self, handle: int) -> None:
        """Add a handle, by its id."""
        self._handles.add(handle)
        self._waiting.add(handle)

    def forget_handle(self, handle: int) -> None:
        """Remove a handle."""
        self._handles.discard(handle)
        self._note_given(handle)

    def _note_given(self, handle: int) -> None:
        self._waiting.discard(handle)
        if not self._waiting:
            self._uncount()
            self._given_in = current_graph_task_id()
            if self.host_copy is not None:
                self._device = None

    def _hand_over(self, flat: Tensor) -> Tensor:
        if self._arrival is None:  # it never went
            return flat
        self._arrival.wait(flat)
        if flat.numel() < self.num_bytes:
            flat = self._device = flat.view(torch.bfloat16).to(self._packed_dtype).view(torch.uint8)
            self._arrival = self._place.copies.note_made(flat)
        if self._version is None:
            self._version = num_writes(flat)
        return flat

    def _fetch_ahead(self, window_bytes: int) -> None:
        """Begin to fetch what was saved before this, which is about to be given, as far as the window reaches."""
        items, backward = self.run.items, current_graph_task_id()
        room = window_bytes - self.run.resident_bytes + self._counted_bytes
        if room <= 0:
            return
        for number in range(self.number - 1, max(-1, self.number - 1 - _LOOK_AHEAD), -1):
            reference = items.get(number)
            earlier = reference() if reference is not None else None
            if earlier is None or earlier.is_here:
                continue
            if earlier.num_bytes > room:
                return
            room -= earlier.num_bytes
            if earlier._given_in == backward:  # and may be in use
                continue
            try:
                earlier.fetch()
            except (torch.OutOfMemoryError, OffloadError):  # whoever needs it now may still have it
                return

    def _release_memory(self, window_bytes: int) -> None:
        """Pass over what was saved after this and nobody asked for, if it fills the window.

        The backward took another way: of two losses of one forward only the first, say.
        """
        run = self.run
        if run.resident_bytes and run.resident_bytes + self.num_bytes > window_bytes:
            for reference in list(run.items.values()):  # not items(): a collection between two pairs changes it
                later = reference()
                if later is not None and later.number > self.number:
                    later._pass_over()

    def _pass_over(self) -> None:
        """Drop a copy nobody asked for, or at least do not count it."""
        if self.host_copy is not None and self._waiting == self._handles:
            self._device = self._arrival = None
        self._uncount()

    def _hold(self, flat: Tensor, arrival: H2DCopy | None) -> None:
        self._uncount()  # what it holds already, if that was written to
        self._device, self._arrival, self._version = flat, arrival, None
        self._waiting = set(self._handles)
        self._counted_bytes = self.num_bytes
        self.run.resident_bytes += self.num_bytes

    def _uncount(self) -> None:
        """Count it no longer among what waits on the device."""
        self.run.resident_bytes -= self._counted_bytes
        self._counted_bytes = 0

    def _pack(self, flat: Tensor) -> Tensor:
        packed = self._packed_dtype
        return flat if packed is None else flat.view(packed).to(torch.bfloat16).view(torch.uint8)

    def _make(self) -> Tensor:
        packed = self._packed_dtype
        return self._place.make(self.num_bytes if packed is None else self.num_bytes // packed.itemsize * 2)
