"""Remember what was made of the memory of a tensor, so that views and second saves of it share that."""

import weakref
from collections.abc import Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lightning_vram.core.tensors.versions import version_of
from lightning_vram.private_names.torch.tensors import storage_key

Made = TypeVar("Made")


class StorageMemo(Generic[Made]):
    """Finds what was made of a storage, as long as the storage is alive and unwritten, and what was made of it, too.

    Storages are known by address, which is used again after death: a weak reference clears the entry first.
    """

    def __init__(self) -> None:
        self._made: dict[int, tuple[weakref.ref[torch.UntypedStorage], dict[Hashable, weakref.ref[Made]]]] = {}

    def find(self, tensor: Tensor, key: Hashable = None) -> Made | None:
        """Return what was noted for the storage of ``tensor``, its present version and ``key``."""
        entry = self._made.get(storage_key(tensor.untyped_storage()))
        reference = entry[1].get((version_of(tensor), key)) if entry is not None else None
        return reference() if reference is not None else None

    def note(self, tensor: Tensor, made: Made, key: Hashable = None) -> None:
        """Remember ``made`` for the storage of ``tensor``, its present version and ``key``, without keeping either."""
        storage = tensor.untyped_storage()
        address = storage_key(storage)
        if address not in self._made:
            self._made[address] = (weakref.ref(storage, lambda reference: self._forget(address, reference)), {})
        self._made[address][1][version_of(tensor), key] = weakref.ref(made)

    def clear(self) -> None:
        """Forget everything."""
        self._made.clear()

    def _forget(self, address: int, reference: "weakref.ref[torch.UntypedStorage]") -> None:
        entry = self._made.get(address)
        if entry is not None and entry[0] is reference:
            del self._made[address]
