"""Note something about the memory of tensors, whichever view of it is asked about, for as long as the memory lives."""

import weakref
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lightning_vram.core.tensors.versions import storage_address

Value = TypeVar("Value")


class ByMemory(Generic[Value]):
    """Values by memory. It keeps none alive, and an address that was used again is no longer the same memory."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[weakref.ref[torch.UntypedStorage], Value]] = {}

    def __len__(self) -> int:
        return len(self._noted)

    def find(self, tensor: Tensor) -> Value | None:
        """Return what was noted for the memory of ``tensor``."""
        storage, value = self._noted.get(storage_address(tensor), (None, None))
        return value if storage is not None and storage() is not None else None

    def note(self, tensor: Tensor, value: Value) -> None:
        """Note ``value`` for the memory of ``tensor``, if it is one piece."""
        address = storage_address(tensor)
        if address:
            self._noted[address] = weakref.ref(tensor.untyped_storage()), value

    def drop(self, tensor: Tensor) -> None:
        """Forget what was noted for the memory of ``tensor``."""
        self._noted.pop(storage_address(tensor), None)

    def clear(self) -> None:
        """Forget everything."""
        self._noted.clear()
