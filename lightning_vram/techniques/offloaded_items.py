"""What was offloaded, one item per storage, and the tensors that were views of it."""

import weakref

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from lightning_vram.techniques.forward_history import Run
from lightning_vram.techniques.host_arena import unseen
from lightning_vram.techniques.offload_places import Parcel
from lightning_vram.techniques.offload_routes import Route
from lightning_vram.techniques.transfers import Arrival
from lightning_vram.techniques.versions import version_counter


class OffloadedItem:
    """Bytes of one storage: sent away, or kept because they are needed again at once.

    Its copy on the device is held until each handle was asked once; then it lives as long as somebody uses it.
    Handles die in any thread and at any moment: what that does to the counts below takes no lock. The worst that can
    come of it is a copy that is held too long, or fetched again.
    """

    __slots__ = (
        "__weakref__",
        "_arrival",
        "_device",
        "_lent",
        "_load",
        "_num_handles",
        "_num_waiting",
        "_packed_dtype",
        "_route",
        "_snapshot",
        "counted_bytes",
        "num_bytes",
        "number",
        "parcel",
        "run",
    )

    def __init__(self, run: Run, route: Route, num_bytes: int, packed_dtype: torch.dtype | None) -> None:
        self.run = run
        self.number = len(run.items)
        self.num_bytes = num_bytes
        self.parcel: Parcel | None = None
        self._route = route
        self._packed_dtype = packed_dtype  # of a tensor that travels in bfloat16
        self._arrival: Arrival | None = None
        self._device: Tensor | None = None
        self._lent: weakref.ref[torch.UntypedStorage] | None = None
        self._snapshot: tuple[Tensor, int] | None = None
        self._load = self._num_handles = self._num_waiting = self.counted_bytes = 0
        run.items.append(weakref.ref(self))

    def __del__(self) -> None:
        self.uncount()

    @property
    def is_here(self) -> bool:
        """Whether its bytes are on the device, or on their way."""
        return self._device is not None or self._in_flight() is not None or self._find_lent() is not None

    def keep(self, flat: Tensor, window_bytes: int) -> None:
        """Leave the bytes where they are; copies in flight and what is kept share the window."""
        self._hold(flat, None)
        self._route.copies.settle(window_bytes - self.run.resident_bytes)

    def send(self, flat: Tensor, tensor: Tensor, window_bytes: int) -> None:
        """Send the bytes of ``tensor`` away."""
        self.parcel = self._route.place.put(flat, window_bytes)
        if self.parcel.departure.source is not None:
            self._snapshot = version_counter(tensor), tensor._version

    def fetch(self) -> None:
        """Begin to bring the bytes back."""
        assert self.parcel is not None
        packed = self._packed_dtype
        target = self._route.make(self.num_bytes if packed is None else self.num_bytes // packed.itemsize * 2)
        self._hold(target, self.parcel.fetch(target, self._route.copies.mark()))

    def find(self) -> Tensor | None:
        """Return the bytes, flat, for what is queued on the current stream from now on; ``None`` if they are away."""
        flat = self._device
        if flat is None:
            flat = self._in_flight()
            if flat is not None:
                return flat
            flat = self._find_lent()
        if flat is not None and self._arrival is not None:
            self._arrival.wait(flat)
            if self._packed_dtype is not None:
                flat = self._device = flat.view(torch.bfloat16).to(self._packed_dtype).view(torch.uint8)
                self._arrival = None
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

    def pass_over(self) -> None:
        """Drop a copy nobody asked for, or at least do not count it: the backward took another way."""
        if self.parcel is not None and self._num_waiting == self._num_handles:
            self._device = self._arrival = None
        self.uncount()

    def uncount(self) -> None:
        """Count it no longer among what waits on the device."""
        self.run.resident_bytes -= self.counted_bytes
        self.counted_bytes = 0

    def _hold(self, flat: Tensor, arrival: Arrival | None) -> None:
        self._device, self._arrival = flat, arrival
        self._load += 1
        self._num_waiting = self._num_handles
        self.counted_bytes = self.num_bytes
        self.run.resident_bytes += self.num_bytes

    def _let_go(self) -> None:
        self.uncount()
        flat = self._device
        if self.parcel is None or flat is None:
            return
        if type(flat) is not FakeTensor:  # set_(), which would be needed to find it, leaks fake memory
            self._lent = weakref.ref(flat.untyped_storage())
        self._device = None

    def _find_lent(self) -> Tensor | None:
        storage = self._lent() if self._lent is not None else None
        if storage is None:
            return None
        return self._route.wrap(storage)

    def _in_flight(self) -> Tensor | None:
        """Return the very memory it was copied from, as long as a copy in flight holds it and nobody wrote to it."""
        if self._snapshot is None or self.parcel is None or self._packed_dtype is not None:
            return None
        source = self.parcel.departure.source
        counter, version = self._snapshot
        return source if counter._version == version else None


def to_view(flat: Tensor, dtype: torch.dtype, geometry: "Geometry") -> Tensor:
    """Return the tensor that ``geometry`` tells of, on the bytes of ``flat``."""
    with unseen(flat):
        remainder = flat.numel() % dtype.itemsize
        typed = (flat.narrow(0, 0, flat.numel() - remainder) if remainder else flat).view(dtype)
        view = typed.as_strided(geometry.shape, geometry.strides, typed.storage_offset() + geometry.offset)
        if geometry.is_conj:
            view = view.conj()
        return torch._neg_view(view) if geometry.is_neg else view


class Geometry:
    """How a tensor lies in its memory."""

    __slots__ = ("is_conj", "is_neg", "offset", "shape", "strides")

    def __init__(self, tensor: Tensor, offset: int) -> None:
        self.shape, self.strides, self.offset = tensor.shape, tensor.stride(), offset
        self.is_conj, self.is_neg = tensor.is_conj(), tensor.is_neg()


def to_flat(tensor: Tensor, start: int, length: int) -> Tensor:
    """Return ``length`` elements of the memory of an alias from ``start`` on, as they lie there."""
    with unseen(tensor):
        if tensor.is_neg():
            tensor = torch._neg_view(tensor)
        if tensor.is_conj():
            tensor = tensor.conj()
        return tensor.as_strided((length,), (1,), start)


def as_bytes(flat: Tensor) -> Tensor:
    """Return the bytes of a flat tensor."""
    with unseen(flat):
        return flat.view(torch.uint8)
