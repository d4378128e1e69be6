"""Offload what autograd saves for the backward to host memory or disk, and bring it back in time.

Each saved tensor of some size is copied to the host while the forward goes on; in the backward, what was saved before
is fetched ahead. Views of one storage are copied once. What is saved last is needed first and stays. Other names:
activation swapping (vDNN, https://arxiv.org/abs/1602.08124), ``torch.autograd.graph.save_on_cpu``.

It costs host memory as large as the activations, PCIe bandwidth, and Python time: about 60 microseconds in the forward
and 40 in the backward per storage, 2 for a tensor that is too small, next to the 10 of any hook. It does not help on
layers that compute less than their activations take to copy (checkpoint those, and offload what the checkpoint saves),
on what a ``torch.autograd.Function`` hides in attributes, and on outputs that are held anyway.
"""

import os
import threading
import weakref
from collections.abc import Hashable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_vram.core.hooks import SavedTensorStage, StoredTensor, innermost_stage, is_unfinished
from lightning_vram.core.host.disk import DiskRing
from lightning_vram.core.host.memory import HostArena, hidden_from_modes
from lightning_vram.core.tensors.properties import alias
from lightning_vram.memory.device.accelerators import is_capturing
from lightning_vram.memory.storages import ByStorage, iterate_storages, iterate_tensors, storage_address, version_of
from lightning_vram.memory.tracking.operator_listener import OperatorSubscriber
from lightning_vram.private_names.dispatcher import FakeTensor
from lightning_vram.private_names.torch import current_graph_task_id, num_nodes
from lightning_vram.techniques.activation_offload.items import (
    ForwardHistory,
    HostCopy,
    OffloadedItem,
    Place,
    Run,
    find_span,
    to_bytes,
)


@dataclass(frozen=True)
class OffloadReport:
    """What an ``ActivationOffloading`` did since it was entered last."""

    offloaded_bytes: int  # bytes of the device that were sent away. Each storage counts once.
    kept_bytes: int  # bytes that were large enough and stayed: needed again at once, or more than may travel
    num_offloaded: int  # storages that were sent away
    host_bytes: int  # host memory taken so far, whether in use or not
    disk_bytes: int  # size of the file


_WINDOW_SHARE = 16  # "auto": this part of what a forward saves
_EXCESS_SHARE = 2  # of what stays in excess: used up by then, its room serves what is fetched ahead
_PACKED_DTYPES = (torch.float32, torch.float64)


class OffloadHandle(StoredTensor):
    """A tensor that was offloaded: how it lies in the bytes of its item, which it may share with others."""

    __slots__ = ("_dtype", "_geometry", "_stage", "item")

    def __init__(self, stage: "ActivationOffloading", item: OffloadedItem, tensor: Tensor, offset: int) -> None:
        self.item = item
        item.note_handle(id(self))
        self._stage, self._dtype = stage, tensor.dtype
        self._geometry = tensor.shape, tensor.stride(), offset  # in elements, from the first byte of the item

    def __del__(self) -> None:
        self.item.forget_handle(id(self))

    @property
    def num_bytes(self) -> int:  # noqa: D102
        return 0 if self.item.host_copy is not None else self.item.num_bytes

    @property
    def is_snapshot(self) -> bool:  # noqa: D102
        return self.item.host_copy is not None

    def before_write(self) -> None:  # noqa: D102
        self._stage.send(self.item).departure.precede()

    def give(self) -> Tensor:  # noqa: D102
        flat, (shape, strides, offset) = self._stage.bring(self), self._geometry
        with hidden_from_modes(flat):
            remainder = flat.numel() % self._dtype.itemsize
            typed = (flat.narrow(0, 0, flat.numel() - remainder) if remainder else flat).view(self._dtype)
            return typed.as_strided(shape, strides, typed.storage_offset() + offset)


class ActivationOffloading(SavedTensorStage):
    """Moves what autograd saves off the device, while it is entered.

    Enter it around a forward, or a whole training step; it is the outermost of several stages. Gradients are those of
    the plain run, to the bit, unless ``compress`` is set. What a backward saves itself (``create_graph=True``) stays.
    A backward that writes to what it saved spoils its own copy only; plain autograd may refuse others that saved it,
    too. Of writes that PyTorch does not count (by way of ``.data``, by NumPy) what stays shows each, as in the plain
    run, and what travels shows those before it was saved; on a GPU, if it was not saved before in the same memory. What
    has no gradient is sent when the next operator saves something: its own may not have written it yet.
    Never travel: parameters, buffers, small tensors, conjugate views, tensors of another device than that of the module
    (indices on the host), and what :meth:`keep_in_place` names. On the CPU, or with fake tensors, the same is done with
    plain copies.

    The arguments are those of :class:`~lightning_vram.callbacks.activation_offload.callback.ActivationOffload`, sizes
    in bytes. Each forward whose backward is still to come has a window of its own; what stays is known from the second
    forward of a kind on. ``most_bytes`` may be set between two steps. Raises ``ValueError`` if ``disk_path`` is no
    folder, and :class:`OffloadError` if no file can be made there; while it is entered, if memory or disk is too small.

    Example:
        >>> layer = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
        >>> offloading = ActivationOffloading(layer, min_offload_bytes=1024)
        >>> with offloading:
        ...     loss = layer(torch.randn(64, 64)).sum()
        >>> offloading.report.offloaded_bytes == 2 * 64 * 64 * 4  # the input and the result of tanh
        True
        >>> loss.backward()
        >>> offloading.close()
    """

    def __init__(  # noqa: PLR0913
        self,
        module: nn.Module | None = None,
        *,
        min_offload_bytes: int = 1 << 20,
        window_bytes: int | str = "auto",
        most_bytes: int | None = None,
        compress: Literal["none", "bf16"] = "none",
        disk_path: str | os.PathLike[str] | None = None,
        pin_memory: bool = True,
    ) -> None:
        super().__init__(module)
        self._min_bytes, self.most_bytes, self._compress = min_offload_bytes, most_bytes, compress
        self._window_bytes = None if isinstance(window_bytes, str) else window_bytes  # None: "auto"
        self._lock = threading.RLock()  # autograd has a thread for each device
        self._items: ByStorage[dict[Hashable, weakref.ref[OffloadedItem]]] = ByStorage()  # by version and part
        self._in_place: ByStorage[bool] = ByStorage()
        self._lasting: set[int] = set()  # addresses of the storages of parameters and buffers
        self._may_be_host = True  # whether the host is the device
        self._history = ForwardHistory()
        self._disk_path, self._pins_fakes = disk_path, pin_memory
        self._pin_memory = pin_memory and torch.accelerator.is_available()
        self._places: dict[tuple[torch.device, Any], Place] = {}  # one for each device, and for each mode of fakes
        self._ring: DiskRing | None = None
        self._open()
        self._late: list[weakref.ref[OffloadedItem]] = []  # saved by the last operator, which may not have written them
        self._late_operator = -1
        self._offloaded_bytes = self._kept_bytes = self._num_offloaded = 0

    @property
    def report(self) -> OffloadReport:
        """What was done since it was entered last."""
        host_bytes, disk_bytes = sum(arena.total_bytes for arena in self._arenas), 0
        if self._ring is not None:
            host_bytes, disk_bytes = host_bytes + self._ring.staging_bytes, self._ring.total_bytes
        return OffloadReport(self._offloaded_bytes, self._kept_bytes, self._num_offloaded, host_bytes, disk_bytes)

    @property
    def num_away(self) -> int:
        """Storages that are away now, of all steps."""
        on_disk = self._ring.num_blocks if self._ring is not None else 0
        return on_disk + sum(arena.num_blocks for arena in self._arenas)

    @property
    def _arenas(self) -> list[HostArena]:
        return [place.arena for place in self._places.values() if place.arena is not None]

    def keep_in_place(self, nest: Any) -> None:
        """Name tensors that are held anyway, such as the batch: their memory does not travel as long as it lives."""
        with self._lock:
            for tensor in iterate_tensors(nest):
                for storage, _ in iterate_storages(tensor):
                    self._in_place.note_storage(storage, True)  # noqa: FBT003

    def settle(self) -> None:
        """Let go of device memory that copies held which are finished by now."""
        with self._lock:
            for place in self._places.values():
                place.copies.settle()

    def close(self) -> None:
        """Give host memory and file back. What is still away in host memory can be brought back, from disk not."""
        with self._lock:
            self._items.clear()
            for place in self._places.values():
                place.copies.close()
            for arena in self._arenas:
                arena.close()
            self._places.clear()
            if self._ring is not None:
                self._ring.close()
                self._ring = None

    def _open(self) -> None:
        """Make the file, if there is to be one and it was closed."""
        if self._disk_path is not None and self._ring is None:
            self._ring = DiskRing(self._disk_path, pin_memory=self._pin_memory)

    @override
    def begin(self, stack: ExitStack) -> OperatorSubscriber | None:
        tensors = [] if self._module is None else [*self._module.parameters(), *self._module.buffers()]
        self._lasting = {storage_address(tensor) for tensor in tensors} | {0}
        self._may_be_host = all(tensor.device.type == "cpu" for tensor in tensors)
        self._open()
        self._offloaded_bytes = self._kept_bytes = self._num_offloaded = 0
        self._history.start()
        self.settle()
        for end in (self.settle, self._history.end_forward, self._send_late):
            stack.callback(end)
        return None

    @override
    def take(self, tensor: Tensor) -> StoredTensor | None:
        if self._late and num_nodes() != self._late_operator:
            self._send_late()
        if not self._can_offload(tensor):
            return self.hand_on(tensor)
        with self._lock:
            item, offset = self._find_item(tensor)
            return OffloadHandle(self, item, tensor, offset) if item is not None else self.hand_on(tensor)

    def bring(self, handle: OffloadHandle) -> Tensor:
        """Return the bytes of an item, for one of its handles."""
        with self._lock:
            if current_graph_task_id() != -1:  # a stage inside may look at what it saved in a forward, too
                self._history.end_forward()
            run = handle.item.run
            return handle.item.give(id(handle), self._find_window(run) + self._find_excess(run) // _EXCESS_SHARE)

    def send(self, item: OffloadedItem) -> HostCopy:
        """Send an item away, if it was not."""
        with self._lock:
            if item.host_copy is None:
                item.send(self._find_window(item.run) + self._find_excess(item.run))
                self._offloaded_bytes += item.num_bytes
                self._num_offloaded += 1
        assert item.host_copy is not None
        return item.host_copy

    def _send_late(self) -> None:
        late = [item for reference in self._late if (item := reference()) is not None]
        self._late.clear()
        for item in late:
            self.send(item)

    def _can_offload(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, or a part of its memory, may be sent away."""
        if storage_address(tensor) in self._lasting or tensor.untyped_storage().nbytes() < max(1, self._min_bytes):
            return False
        if self._in_place.find(tensor) or current_graph_task_id() != -1:
            return False  # what a backward saves is needed again at once, or by the next backward
        is_plain = not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
        return is_plain and tensor.numel() > 0 and self._is_on_device(tensor)

    def _is_on_device(self, tensor: Tensor) -> bool:
        kind = tensor.device.type
        if kind == "cpu":
            return self._may_be_host
        if type(tensor) is not FakeTensor and (kind == "meta" or is_capturing(tensor.device)):
            return False
        self._may_be_host = False  # a module on the host that computes elsewhere: FSDP2 with offload
        return True

    def _find_item(self, tensor: Tensor) -> tuple[OffloadedItem | None, int]:
        """Return the item with the memory of ``tensor``, and where in it the tensor begins; ``None`` if it is small."""
        packed = tensor.dtype if self._compress == "bf16" and tensor.dtype in _PACKED_DTYPES else None
        item, start = self._find_known(tensor, packed, 0), 0
        if item is None:
            start, length = find_span(tensor)
            if length * tensor.dtype.itemsize < self._min_bytes:
                return None, 0
            is_whole = start == 0 and length * tensor.dtype.itemsize == tensor.untyped_storage().nbytes()
            key = packed if is_whole else (packed, tensor.dtype, start, length)
            item = None if is_whole else self._find_known(tensor, key, start)
            if item is None:
                item = self._make_item(tensor, start, length, packed)
                if item is not None:
                    known = self._items.find(tensor)
                    if known is None:
                        self._items.note(tensor, known := {})
                    known[version_of(tensor), key] = weakref.ref(item)
                return item, int(tensor.storage_offset()) - start
        # What is kept is no snapshot. Autograd's own users ask for none, a stage inside may: it keeps what it has.
        may_share = item.host_copy is not None or innermost_stage() is self
        return (item if may_share else None), int(tensor.storage_offset()) - start

    def _find_known(self, tensor: Tensor, key: Hashable, start: int) -> OffloadedItem | None:
        reference = (self._items.find(tensor) or {}).get((version_of(tensor), key))
        item = reference() if reference is not None else None
        return item if item is not None and item.still_holds(tensor, start) else None

    def _make_item(self, tensor: Tensor, start: int, length: int, packed: torch.dtype | None) -> OffloadedItem | None:
        num_bytes = length * tensor.dtype.itemsize
        run, position = self._history.add(num_bytes)
        window_bytes = self._find_window(run)
        is_last = run.expected_bytes - window_bytes <= position and position + num_bytes <= run.expected_bytes
        is_excess = self.most_bytes is not None and position + num_bytes > self.most_bytes
        stays = is_last or is_excess
        if stays:
            self._kept_bytes += num_bytes
            if innermost_stage() is not self:
                self._in_place.note(tensor, True)  # noqa: FBT003
                return None
        place = self._find_place(tensor)
        item = OffloadedItem(run, place, to_bytes(alias(tensor), start, length), None if stays else packed)
        if stays:  # copies in flight and what is kept share the window
            place.copies.settle(window_bytes + self._find_excess(run) - run.resident_bytes)
        elif is_unfinished(tensor):
            self._late.append(weakref.ref(item))
            self._late_operator = num_nodes()
        else:
            self.send(item)
        return item

    def _find_place(self, tensor: Tensor) -> Place:
        """Return the place for the device of ``tensor``."""
        fake_mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
        key = (tensor.device, fake_mode)
        if key not in self._places:
            # Tensors of two fake modes do not mix.
            self._places = {old: known for old, known in self._places.items() if old[1] in (None, fake_mode)}
            is_fake, arena = fake_mode is not None, None
            if self._ring is None:
                pins_fakes = self._pins_fakes and tensor.device.type not in ("cpu", "meta")
                like = tensor.new_empty(0) if is_fake else None
                arena = HostArena(pin_memory=pins_fakes if is_fake else self._pin_memory, like=like)
            self._places[key] = Place(arena, None if is_fake else self._ring, tensor)
        return self._places[key]

    def _find_window(self, run: Run) -> int:
        if self._window_bytes is not None:
            return self._window_bytes
        return max(run.largest_bytes, max(run.saved_bytes, run.expected_bytes) // _WINDOW_SHARE)

    def _find_excess(self, run: Run) -> int:
        """Return what stays of a forward because it is more than may travel: until then copies may take its place."""
        return max(0, max(run.saved_bytes, run.expected_bytes) - self.most_bytes) if self.most_bytes is not None else 0
