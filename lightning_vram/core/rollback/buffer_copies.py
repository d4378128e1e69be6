"""Hold copies of tensors over many steps, and copy again only what may have changed."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_vram.core.rollback.attribute_state import AttributeLayout
from lightning_vram.core.tensors.parameter_classes import REAL_TYPES
from lightning_vram.core.tensors.versions import NO_VERSION, is_strided, storage_address, version_of
from lightning_vram.memory.device.accelerators import has_streams
from lightning_vram.memory.units import MIB
from lightning_vram.private_names.torch.operators import copy_each

ALWAYS_COPIED_BYTES = MIB
_PLAIN_KINDS = (Tensor, nn.Parameter, nn.Buffer)


def differs(tensor: Tensor, start: Tensor | None) -> bool:
    """Whether a tensor was written past its version counter: through ``.data``, or by a kernel."""
    is_plain = (type(tensor) is nn.Buffer or type(tensor) in REAL_TYPES) and tensor.layout is torch.strided
    if type(start) is not Tensor or not is_plain or tensor.is_meta or tensor.is_nested:
        return False
    if tensor.shape != start.shape or torch.equal(tensor, start):
        return tensor.shape != start.shape
    return not bool(((tensor == start) | ((tensor != tensor) & (start != start))).all())  # NaN is not a change


class BufferCopy:
    """One tensor, and its value at one time."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.is_plain = type(tensor) in _PLAIN_KINDS and is_strided(tensor)
        self.is_small = self.is_plain and tensor.nbytes <= ALWAYS_COPIED_BYTES
        self._is_counted: bool | None = None if self.is_plain else False  # whether the version tells of all writes
        self.value = tensor.detach().clone() if self.is_small or not self.is_plain else tensor.detach().cpu().clone()
        self._mark()

    def is_replaced(self) -> bool:
        """Whether the tensor has another shape, type or device than the copy was made for."""
        tensor, (shape, dtype, device, _) = self.tensor, self._place
        return tensor.dtype is not dtype or tensor.shape != shape or tensor.device != device

    def is_changed(self) -> bool:
        """Whether the tensor may have been written since the copy was made."""
        return not self._is_counted or self._has_changed_visibly()

    def refresh(self) -> None:
        """Copy a tensor that is not small again, if it may have been written."""
        if self._is_counted is None and not self._has_changed_visibly():
            self._is_counted = not differs(self.tensor.detach().to(self.value.device), self.value)
        if self.is_changed():
            if self.is_plain and has_streams(self.tensor.device.type) and not self.value.is_pinned():
                self.value = torch.empty_like(self.value, pin_memory=True)
            self.value.copy_(self.tensor.detach(), non_blocking=self.value.is_pinned())
            self._mark()

    def restore(self) -> None:
        """Write the value back, in place."""
        if not self.is_changed():
            return
        is_inference = self.tensor.is_inference()
        with torch.inference_mode(mode=is_inference), torch.no_grad():
            if self.is_replaced():
                self.tensor.data = self.value.to(self._place[2], copy=True)
            else:
                # The copy back is ordered before the next refresh: both run on the current stream.
                self.tensor.copy_(self.value, non_blocking=self.value.is_pinned())
        self._mark()

    def _has_changed_visibly(self) -> bool:
        return version_of(self.tensor) != self._version or _place(self.tensor) != self._place

    def _mark(self) -> None:
        self._version = version_of(self.tensor)
        self._place = _place(self.tensor)
        if self._version == NO_VERSION:
            self._is_counted = False


class BufferCopies:
    """Copies of a model's tensors, held over many steps; with them the layouts of its modules, which only save time.

    Most bytes of buffers are constants (masks, rotary tables): autograd counts writes, so a constant is copied once. Up
    to 1 MiB is copied in every step all the same, in one operation for all tensors of a kind: kernels such as those of
    batch normalization write without being counted. A large tensor that is written uncounted is found in the second
    step, when all of them are compared once, and copied in every step from then on. Copies of large tensors are on the
    host, those of written ones in pinned memory, so that nothing blocks.
    """

    def __init__(self) -> None:
        self.layouts: list[AttributeLayout] = []
        """Of the modules of the last state that was taken with these copies."""
        self._copies: dict[int, BufferCopy] = {}
        self._small: list[BufferCopy] = []
        self._groups: list[tuple[list[Tensor], list[Tensor]]] = []

    def take(self, tensors: Iterable[Tensor]) -> list[BufferCopy]:
        """Return up-to-date copies of tensors with memory, good until the next call; drop those of others."""
        before, self._copies = self._copies, {}
        small: list[BufferCopy] = []
        with torch.inference_mode(mode=False), torch.no_grad():  # a copy made for an evaluation serves training as well
            for place, tensor in {id(tensor): tensor for tensor in tensors}.items():
                copy = before.get(place)
                if copy is None or copy.is_replaced():
                    if tensor.is_meta or is_lazy(tensor):
                        continue
                    copy = BufferCopy(tensor)
                elif copy.is_small:
                    small.append(copy)
                else:
                    copy.refresh()
                self._copies[place] = copy
            if small != self._small:
                self._small, self._groups = small, _group(small)
            for values, originals in self._groups:
                copy_each(values, originals)
        return list(self._copies.values())


def _group(copies: list[BufferCopy]) -> list[tuple[list[Tensor], list[Tensor]]]:
    groups: dict[tuple[torch.dtype, torch.device], list[BufferCopy]] = defaultdict(list)
    for copy in copies:
        groups[copy.tensor.dtype, copy.tensor.device].append(copy)
    return [([copy.value for copy in group], [copy.tensor for copy in group]) for group in groups.values()]


def _place(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device, tuple[int, int]]:
    offset = int(tensor.storage_offset()) if is_strided(tensor) else 0
    return tensor.shape, tensor.dtype, tensor.device, (storage_address(tensor), offset)
