"""The caching allocator of an accelerator: blocks PyTorch has reserved from the driver, in use or not."""

import weakref
from dataclasses import dataclass, replace
from types import ModuleType

import torch

from lightning_vram.memory.device.accelerators import has_statistics


@dataclass(frozen=True)
class AllocatorBytes:
    """What an allocator holds now and held at most since :func:`reset_peaks`."""

    allocated_bytes: int  # in tensors now
    reserved_bytes: int  # taken from the driver now; the part above ``allocated_bytes`` is cache
    peak_allocated_bytes: int  # most bytes in tensors at once
    peak_reserved_bytes: int  # most bytes taken from the driver at once: what ``nvidia-smi`` shows, less the context

    @property
    def fragmentation_bytes(self) -> int:
        """Reserved but unused bytes: cache that only a request of a fitting size can use."""
        return self.reserved_bytes - self.allocated_bytes


def has_cache(device: torch.device) -> bool:
    """Whether tensors on ``device`` come from a caching allocator that :func:`empty_cache` can shrink."""
    return has_statistics(device.type)


def read_allocator(device: torch.device) -> AllocatorBytes:
    """Read the allocator of ``device``."""
    memory = _module(device)
    return AllocatorBytes(
        allocated_bytes=memory.memory_allocated(device),
        reserved_bytes=memory.memory_reserved(device),
        peak_allocated_bytes=memory.max_memory_allocated(device),
        peak_reserved_bytes=memory.max_memory_reserved(device),
    )


def reset_peaks(device: torch.device) -> None:
    """Let the peaks of ``device`` start again from what is held now. Every :class:`PeakWatch` notes them before."""
    memory = _module(device)
    for watch in list(_watches):
        watch.note(device)
    memory.reset_peak_memory_stats(device)


class PeakWatch:
    """Peaks of one's own, though an allocator has one set and others reset it; ``device`` has its index."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._noted = read_allocator(device)
        _watches.add(self)

    def restart(self) -> None:
        """Start again from what is held now."""
        reset_peaks(self._device)
        self._noted = read_allocator(self._device)

    def read(self) -> AllocatorBytes:
        """Return what is held now, and the most since the last :meth:`restart`."""
        now = read_allocator(self._device)
        return replace(
            now,
            peak_allocated_bytes=max(now.peak_allocated_bytes, self._noted.peak_allocated_bytes),
            peak_reserved_bytes=max(now.peak_reserved_bytes, self._noted.peak_reserved_bytes),
        )

    def note(self, device: torch.device) -> None:
        """Remember the peaks before those of ``device`` are reset."""
        if device == self._device:
            self._noted = self.read()


_watches: weakref.WeakSet[PeakWatch] = weakref.WeakSet()


def empty_cache(device: torch.device) -> int:
    """Return unused cached blocks of all devices of this kind to the driver; returns the bytes freed on ``device``.

    Waits for the device to finish its queued work, and later allocations must ask the driver again, so call it rarely.
    """
    if not has_cache(device):
        return 0
    memory = _module(device)
    reserved_bytes = int(memory.memory_reserved(device))
    memory.empty_cache()
    return reserved_bytes - int(memory.memory_reserved(device))


def _module(device: torch.device) -> ModuleType:
    if not has_cache(device):
        raise ValueError(f"device '{device}' has no caching allocator with statistics.")
    module: ModuleType = torch.get_device_module(device)
    return module
