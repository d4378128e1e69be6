"""How much memory of a device is free, and how much a piece of work used."""

import torch

from lightning_vram.memory.device.allocator import PeakWatch, has_cache, read_allocator
from lightning_vram.memory.device.process_limit import limited_share


class DeviceRoom:
    """Measures work on a device (with its index): :meth:`reset`, do it, ask. All numbers are bytes of this process."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watch = PeakWatch(device)

    def reset(self) -> None:
        """Let the peak start again from what is allocated now."""
        self._watch.restart()

    def peak_since_reset(self) -> int:
        """Return the most bytes that were allocated at once since :meth:`reset`, or since this was made."""
        return self._watch.read().peak_allocated_bytes

    def allocated_bytes(self) -> int:
        """Return the bytes that are in tensors now."""
        return read_allocator(self._device).allocated_bytes

    def room_bytes(self) -> int:
        """Return what tensors of this process can still get: free memory and its own cache, within its limit."""
        memory = torch.get_device_module(self._device)
        free_bytes, total_bytes = memory.mem_get_info(self._device)
        now = read_allocator(self._device)
        allowed_bytes = int(total_bytes * limited_share(self._device))
        return int(max(0, min(free_bytes + now.fragmentation_bytes, allowed_bytes - now.allocated_bytes)))


def device_room(device: torch.device) -> DeviceRoom | None:
    """Return the room of ``device``, or ``None`` where no allocator tells (the CPU, MPS)."""
    return DeviceRoom(device) if has_cache(device) else None
