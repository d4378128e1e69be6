"""A tensor that was offloaded: where it lies in bytes that it may share with others."""

from typing import Protocol

from torch import Tensor

from lightning_vram.core.hooks.stage import Taken
from lightning_vram.techniques.activation_offload.geometry import Geometry, to_view
from lightning_vram.techniques.activation_offload.items import OffloadedItem


class Bringer(Protocol):
    """Who brings items back."""

    def bring(self, item: OffloadedItem, load: int) -> tuple[Tensor, int]:
        """Return the bytes of ``item`` for a handle that was asked at ``load`` last, and what to say next time."""


class OffloadHandle(Taken):
    """How a tensor lies in the bytes of its item.

    Args:
        bringer: Brings the item.
        item: The bytes.
        tensor: The tensor that was saved.
        offset: Its first element, counted from the first byte of the item.
    """

    __slots__ = ("_bringer", "_dtype", "_geometry", "_load", "item")

    def __init__(self, bringer: Bringer, item: OffloadedItem, tensor: Tensor, offset: int) -> None:
        self.item = item
        self._load = item.note_handle()
        self._bringer = bringer
        self._dtype = tensor.dtype
        self._geometry = Geometry(tensor, offset)

    def __del__(self) -> None:
        self.item.forget_handle(self._load)

    @property
    def num_bytes(self) -> int:  # noqa: D102
        return 0 if self.item.parcel is not None else self.item.num_bytes

    def before_write(self) -> None:  # noqa: D102
        if self.item.parcel is not None:
            self.item.parcel.departure.precede()

    def give(self) -> Tensor:  # noqa: D102
        flat, self._load = self._bringer.bring(self.item, self._load)
        return to_view(flat, self._dtype, self._geometry)
