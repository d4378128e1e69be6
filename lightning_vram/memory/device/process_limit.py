"""A limit to the device memory of this process, and its removal."""

import torch

from lightning_vram.memory.device.accelerators import has_statistics


class ProcessLimit:
    """Limit the bytes that PyTorch reserves in this process on a device (with its index), until :meth:`remove`."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        if not can_limit(device):
            raise ValueError(f"device '{device}' does not support a memory limit per process.")
        self._device = device
        memory = torch.get_device_module(device)
        self._before: float | None = limited_share(device)
        memory.set_per_process_memory_fraction(min(1.0, limit_bytes / total_bytes(device)), device)

    def remove(self) -> None:
        """Put back the limit that was there. Calling it again does nothing."""
        if self._before is not None:
            torch.get_device_module(self._device).set_per_process_memory_fraction(self._before, self._device)
            self._before = None


def can_limit(device: torch.device) -> bool:
    """Whether :class:`ProcessLimit` can be had on ``device``."""
    return has_statistics(device.type) and hasattr(torch.get_device_module(device), "set_per_process_memory_fraction")


def limited_share(device: torch.device) -> float:
    """Return which part of ``device`` this process may take."""
    read = getattr(torch.get_device_module(device), "get_per_process_memory_fraction", None)  # XPU: since torch 2.10
    return 1.0 if read is None else float(read(device))


def total_bytes(device: torch.device) -> int:
    """Return what ``device`` has in all, for all processes."""
    return int(torch.get_device_module(device).mem_get_info(device)[1])
