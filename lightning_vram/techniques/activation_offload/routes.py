"""The ways that offloaded tensors take: from which device, to host memory or a file, by which copies."""

import os
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.host.arena import HostArena, unseen
from lightning_vram.core.host.disk_ring import DiskRing
from lightning_vram.core.host.transfers import Copies, make_copies
from lightning_vram.private_names.torch.dispatch import FakeTensor
from lightning_vram.techniques.activation_offload.places import DiskPlace, HostPlace, NoPlace, Place


class Route:
    """The way from one device to where its bytes go, and back.

    Args:
        place: Where they go.
        copies: What brings them there.
        like: A tensor on the device, for its kind: real or fake.
    """

    def __init__(self, place: Place, copies: Copies, like: Tensor) -> None:
        self.place = place
        self.copies = copies
        with unseen(like):
            self._like = like.new_empty(0, dtype=torch.uint8)

    def make(self, num_bytes: int) -> Tensor:
        """Return memory on the device, which whoever counts memory may see."""
        return self._like.new_empty(num_bytes)

    def wrap(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the bytes of ``storage`` as a flat tensor."""
        with unseen(self._like):
            return self._like.new_empty(0).set_(storage)


class OffloadRoutes:
    """Makes routes as tensors ask for them, and owns where they lead.

    Args:
        disk_path: Folder for a file instead of host memory.
        pin_memory: Whether to pin host memory.

    Raises:
        ValueError: If ``disk_path`` is no folder.
        OffloadError: If no file can be made there.
    """

    def __init__(self, disk_path: str | os.PathLike[str] | None, *, pin_memory: bool) -> None:
        self._disk_path = disk_path
        self._pin_memory = pin_memory
        self._routes: dict[tuple[torch.device, Any], Route] = {}
        self._ring: DiskRing | None = None
        self.open()

    @property
    def host_bytes(self) -> int:
        """Host memory taken; fake memory if no other was."""
        real_bytes = self._ring.staging_bytes if self._ring is not None else 0
        fake_bytes = 0
        for (_, fake_mode), route in self._routes.items():
            if fake_mode is None:
                real_bytes += route.place.host_bytes
            else:
                fake_bytes += route.place.host_bytes
        return real_bytes or fake_bytes

    @property
    def disk_bytes(self) -> int:
        """Size of the file."""
        return self._ring.total_bytes if self._ring is not None else 0

    @property
    def num_away(self) -> int:
        """Storages that are away."""
        on_disk = self._ring.num_blocks if self._ring is not None else 0
        return on_disk + sum(route.place.num_blocks for route in self._routes.values())

    def open(self) -> None:
        """Make the file, if there is to be one and it was closed."""
        if self._disk_path is not None and self._ring is None:
            self._ring = DiskRing(self._disk_path, pin_memory=self._pin_memory)

    def close(self) -> None:
        """Give host memory and file back."""
        for route in self._routes.values():
            route.copies.close()
            route.place.close()
        self._routes.clear()
        if self._ring is not None:
            self._ring.close()
            self._ring = None

    def settle(self) -> None:
        """Let go of what finished copies held on the device."""
        for route in self._routes.values():
            route.copies.settle()

    def find(self, tensor: Tensor) -> Route:
        """Return the way from the device of ``tensor``."""
        fake_mode = tensor.fake_mode if isinstance(tensor, FakeTensor) else None
        key = (tensor.device, fake_mode)
        route = self._routes.get(key)
        if route is None:
            # Tensors of two fake modes do not mix.
            self._routes = {old: known for old, known in self._routes.items() if old[1] in (None, fake_mode)}
            copies = make_copies(tensor)
            route = self._routes[key] = Route(self._find_place(tensor, copies), copies, tensor)
        return route

    def _find_place(self, tensor: Tensor, copies: Copies) -> Place:
        like = tensor.new_empty(0)
        is_fake = isinstance(tensor, FakeTensor)
        if self._ring is None:
            arena = HostArena(pin_memory=self._pin_memory and not is_fake, like=like if is_fake else None)
            return HostPlace(arena, copies)
        if is_fake:
            return NoPlace()
        return DiskPlace(self._ring, copies, lambda: make_copies(like))
