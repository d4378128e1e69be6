"""Where each device offloads to, host memory or a file, and the copies in both directions."""

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_vram.core.host.disk import DiskRing
from lightning_vram.core.host.memory import HostArena, hidden_from_modes
from lightning_vram.core.host.transfers import Copies, D2HCopy, H2DCopy, make_copies
from lightning_vram.private_names.dispatcher import FakeTensor


class HostCopy(NamedTuple):
    """Bytes that were sent away; they are gone with this object."""

    departure: D2HCopy
    fetch: Callable[[Tensor, Any], H2DCopy]
    """Begins to copy them into a tensor that was made before some moment."""


class Place:
    """Takes flat bytes of one device and gives them back."""

    def __init__(self, arena: HostArena | None, ring: DiskRing | None, copies: Copies, like: Tensor) -> None:
        # Of this device only: copies may still read what lay there before, and copies of two devices do not wait for
        # each other. ``None`` if there is a disk.
        self.arena = arena
        self._ring = ring  # ``None`` for fake tensors, too, which would be written to the file
        self.copies = copies
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


class OffloadPlaces:
    """Makes a place for each device as its tensors ask for one, and owns the memory and the file."""

    def __init__(self, disk_path: str | os.PathLike[str] | None, *, pin_memory: bool) -> None:
        self._disk_path = disk_path
        self._pins_fakes = pin_memory
        self._pin_memory = pin_memory and torch.accelerator.is_available()
        self._places: dict[tuple[torch.device, Any], Place] = {}
        self._ring: DiskRing | None = None
        self.open()

    @property
    def host_bytes(self) -> int:
        """Host memory taken."""
        staging_bytes = self._ring.staging_bytes if self._ring is not None else 0
        return staging_bytes + sum(arena.total_bytes for arena in self._arenas)

    @property
    def disk_bytes(self) -> int:
        """Size of the file."""
        return self._ring.total_bytes if self._ring is not None else 0

    @property
    def num_away(self) -> int:
        """Storages that are away."""
        on_disk = self._ring.num_blocks if self._ring is not None else 0
        return on_disk + sum(arena.num_blocks for arena in self._arenas)

    @property
    def _arenas(self) -> list[HostArena]:
        return [place.arena for place in self._places.values() if place.arena is not None]

    def open(self) -> None:
        """Make the file, if there is to be one and it was closed."""
        if self._disk_path is not None and self._ring is None:
            self._ring = DiskRing(self._disk_path, pin_memory=self._pin_memory)

    def close(self) -> None:
        """Give host memory and file back."""
        for place in self._places.values():
            place.copies.close()
        for arena in self._arenas:
            arena.close()
        self._places.clear()
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def settle(self) -> None:
        """Let go of what finished copies held on the device."""
        for place in self._places.values():
            place.copies.settle()

    def find(self, tensor: Tensor) -> Place:
        """Return the place for the device of ``tensor``."""
        fake_mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
        key = (tensor.device, fake_mode)
        place = self._places.get(key)
        if place is None:
            # Tensors of two fake modes do not mix.
            self._places = {old: known for old, known in self._places.items() if old[1] in (None, fake_mode)}
            is_fake = fake_mode is not None
            arena = None
            if self._ring is None:
                pins_fakes = self._pins_fakes and tensor.device.type not in ("cpu", "meta")
                like = tensor.new_empty(0) if is_fake else None
                arena = HostArena(pin_memory=pins_fakes if is_fake else self._pin_memory, like=like)
            ring = self._ring if not is_fake else None
            place = self._places[key] = Place(arena, ring, make_copies(tensor), tensor)
        return place
