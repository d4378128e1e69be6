"""Where offloaded bytes go: host memory, or a file. Both take flat bytes and give them back."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_vram.core.host.arena import HostArena, HostBlock
from lightning_vram.core.host.disk_ring import DiskBlock, DiskRing
from lightning_vram.core.host.transfers import Arrival, Copies, Departure


class Parcel(ABC):
    """Bytes that were sent away; they are gone with this object."""

    __slots__ = ("departure",)

    def __init__(self, departure: Departure) -> None:
        self.departure = departure

    @abstractmethod
    def fetch(self, target: Tensor, moment: Any) -> Arrival:
        """Begin to copy them into ``target``, which was made before ``moment``."""


class Place(ABC):
    """Takes bytes of one device."""

    @property
    def host_bytes(self) -> int:
        """Host memory that it has to itself."""
        return 0

    @property
    def num_blocks(self) -> int:
        """Storages that lie in that."""
        return 0

    def close(self) -> None:  # noqa: B027 - not all have any
        """Give that memory back."""

    @abstractmethod
    def put(self, source: Tensor, window_bytes: int) -> Parcel:
        """Send flat bytes away; at most ``window_bytes`` of the device are held for copies in flight."""


class HostPlace(Place):
    """Host memory.

    Args:
        arena: Of this device only: what lay there before may still be read by copies, and the copies of two devices
            do not wait for each other.
        copies: From and to the device.
    """

    def __init__(self, arena: HostArena, copies: Copies) -> None:
        self._arena = arena
        self._copies = copies

    @property
    def host_bytes(self) -> int:  # noqa: D102
        return self._arena.total_bytes

    @property
    def num_blocks(self) -> int:  # noqa: D102
        return self._arena.num_blocks

    def close(self) -> None:  # noqa: D102
        self._arena.close()

    def put(self, source: Tensor, window_bytes: int) -> Parcel:  # noqa: D102
        block = self._arena.take(source.numel())
        return _HostParcel(block, self._copies, self._copies.send(source, block.pieces, window_bytes))


class DiskPlace(Place):
    """A file."""

    def __init__(self, ring: DiskRing, copies: Copies, make_copies: Callable[[], Copies]) -> None:
        self._ring = ring
        self._copies = copies
        self._make_copies = make_copies

    def put(self, source: Tensor, window_bytes: int) -> Parcel:  # noqa: D102
        return _DiskParcel(self._ring.write(source, self._copies, window_bytes), self._make_copies)


class _HostParcel(Parcel):
    __slots__ = ("_block", "_copies")

    def __init__(self, block: HostBlock, copies: Copies, departure: Departure) -> None:
        super().__init__(departure)
        self._block = block
        self._copies = copies

    def fetch(self, target: Tensor, moment: Any) -> Arrival:
        return self._copies.fetch(self._block.pieces, target, moment)


class _DiskParcel(Parcel):
    __slots__ = ("_block", "_make_copies")

    def __init__(self, block: DiskBlock, make_copies: Callable[[], Copies]) -> None:
        super().__init__(Departure())  # in parts: none of them stands for all
        self._block = block
        self._make_copies = make_copies

    def fetch(self, target: Tensor, moment: Any) -> Arrival:
        return self._block.read(target, self._make_copies, moment)


class NoPlace(Place):
    """Takes fake tensors for a file: there is nothing to write."""

    def put(self, source: Tensor, window_bytes: int) -> Parcel:  # noqa: D102
        return _NoParcel(Departure())


class _NoParcel(Parcel):
    __slots__ = ()

    def fetch(self, target: Tensor, moment: Any) -> Arrival:
        return Arrival()
