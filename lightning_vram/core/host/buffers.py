"""Host memory for gradients from a device."""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_vram.core.host.arena import make_host_tensor
from lightning_vram.private_names.torch.dispatch import detect_fake_mode, without_dispatch

_MOST_IDLE = 8  # backwards: how many gradients are on their way at once differs from one to the next


@dataclass(slots=True, eq=False)
class _Buffer:
    """Memory, and the storage given out of it, which lives as long as any tensor over it."""

    memory: Tensor
    given: "weakref.ref[torch.UntypedStorage] | None" = None
    num_idle: int = 0  # backwards in a row that it was not needed in

    @property
    def is_free(self) -> bool:
        return self.given is None or self.given() is None

    def give(self, num_bytes: int, dtype: torch.dtype) -> Tensor:
        storage = self.memory.untyped_storage()[:num_bytes]  # one of its own, that keeps the memory alive
        self.given, self.num_idle = weakref.ref(storage), -1
        return torch.empty(0, dtype=dtype, device="cpu").set_(storage)


class HostBuffers:
    """Gives out flat tensors in sizes that recur, as gradients do; called by one thread at a time.

    PyTorch rounds pinned memory up to a power of two. Here ordinary memory is taken in the size that is needed, pinned
    in place, and given out again when no tensor uses it any more: pinning is slow, and needs the driver. A tensor must
    be held until a copy to it has finished.
    """

    def __init__(self, *, pin_memory: bool) -> None:
        self._pin_memory = pin_memory
        self._buffers: list[_Buffer] = []

    @property
    def total_bytes(self) -> int:
        """Bytes held here, given out or not."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor: over the smallest memory that is free and large enough, or new memory."""
        num_bytes = numel * dtype.itemsize
        if not self._pin_memory or not num_bytes or detect_fake_mode() is not None:
            return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self._pin_memory)
        fitting = (one for one in self._buffers if one.memory.nbytes >= num_bytes and one.is_free)
        buffer = min(fitting, key=lambda one: one.memory.nbytes, default=None)
        with without_dispatch():  # who counts memory counts that of the device
            if buffer is None:
                buffer = _Buffer(make_host_tensor(num_bytes, torch.uint8, pin_memory=True))
                self._buffers.append(buffer)
            return buffer.give(num_bytes, dtype)

    def end_backward(self) -> None:
        """Free memory that the last backwards did not need, such as that of a first one in another dtype."""
        for buffer in self._buffers:
            buffer.num_idle = buffer.num_idle + 1 if buffer.is_free else 0
        self._buffers = [buffer for buffer in self._buffers if buffer.num_idle < _MOST_IDLE]

    def close(self) -> None:
        """Free the memory; what is given out, when no tensor uses it any more."""
        self._buffers = []
