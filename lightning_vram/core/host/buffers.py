"""Host memory that is taken in the same sizes again and again, as gradients do that come from a device.

PyTorch rounds each that it pins up to a power of two. Here ordinary memory is taken as it is asked for, pinned where it
lies, and given to the next who asks once nobody has it any more: pinning is slow, and needs the driver.
"""

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_vram.core.host.arena import make_host_tensor
from lightning_vram.private_names.torch.dispatch import detect_fake_mode, without_dispatch

_MOST_IDLE = 8  # backwards: how many gradients are on their way at once differs from one to the next


@dataclass(slots=True, eq=False)
class _Buffer:
    """Memory, and what was given out of it: its storage lives as long as any tensor over it."""

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
    """Gives out flat tensors; called by one thread at a time.

    Whoever has a copy to one under way has to keep it until that has come.

    Args:
        pin_memory: Whether to pin them. Without, PyTorch's allocator has them each time.
    """

    def __init__(self, *, pin_memory: bool) -> None:
        self._pin_memory = pin_memory
        self._buffers: list[_Buffer] = []

    @property
    def total_bytes(self) -> int:
        """Bytes that are kept here, given out or not."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor without values: the memory of the smallest that is free and large enough, or more."""
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
        """Give back what was not needed in the last backwards, such as that of a first one in another dtype."""
        for buffer in self._buffers:
            buffer.num_idle = buffer.num_idle + 1 if buffer.is_free else 0
        self._buffers = [buffer for buffer in self._buffers if buffer.num_idle < _MOST_IDLE]

    def close(self) -> None:
        """Give back what is free, and the rest when nobody has it any more."""
        self._buffers = []
