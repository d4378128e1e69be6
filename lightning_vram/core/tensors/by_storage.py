"""Values by the memory of tensors."""

import weakref
from collections.abc import Hashable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from lightning_vram.core.tensors.versions import storage_address, version_of
from lightning_vram.private_names.torch.tensors import storage_identity, storage_key

Value = TypeVar("Value")
_FEWEST_TO_PRUNE = 64


class ByStorage(Generic[Value]):
    """Values by storage, for any view of it. It keeps no storage alive, and drops the dead as their number grows.

    A storage is known by its address, which is used again after its death: a weak reference with each value detects
    that.
    """

    def __init__(self) -> None:
        self._noted: dict[int, tuple[weakref.ref[torch.UntypedStorage], Value]] = {}
        self._prune_at = _FEWEST_TO_PRUNE

    def __len__(self) -> int:
        return len(self._noted)

    def find(self, tensor: Tensor) -> Value | None:
        """Return the value for the memory of ``tensor``; ``None`` also if that is not one piece (sparse)."""
        try:
            noted = self._noted.get(storage_identity(tensor))  # not storage_address(): this runs for every operator
        except (NotImplementedError, RuntimeError):
            return None
        return noted[1] if noted is not None and noted[0]() is not None else None

    def find_storage(self, storage: torch.UntypedStorage) -> Value | None:
        """Return the value for ``storage``."""
        reference, value = self._noted.get(storage_key(storage), (None, None))
        return value if reference is not None and reference() is not None else None

    def note(self, tensor: Tensor, value: Value) -> None:
        """Set ``value`` for the memory of ``tensor``, if it is one piece."""
        if storage_address(tensor):
            self.note_storage(tensor.untyped_storage(), value)

    def note_storage(self, storage: torch.UntypedStorage, value: Value) -> None:
        """Set ``value`` for ``storage``."""
        self._noted[storage_key(storage)] = weakref.ref(storage), value
        if len(self._noted) >= self._prune_at:
            for key, (reference, _) in list(self._noted.items()):  # a list: another thread may note something
                if reference() is None:
                    self._noted.pop(key, None)
            self._prune_at = max(_FEWEST_TO_PRUNE, 2 * len(self._noted))

    def values(self) -> list[Value]:
        """Return all values, perhaps of dead storages, too."""
        return [value for _, value in list(self._noted.values())]

    def drop(self, tensor: Tensor) -> None:
        """Forget what was noted for the memory of ``tensor``."""
        self._noted.pop(storage_address(tensor), None)

    def clear(self) -> None:
        """Forget everything."""
        self._noted.clear()


class StorageMemo(Generic[Value]):
    """Finds what was made of a storage, as long as the storage is alive and unwritten, and the result is alive, too."""

    def __init__(self) -> None:
        self._made: ByStorage[dict[Hashable, weakref.ref[Value]]] = ByStorage()

    def find(self, tensor: Tensor, key: Hashable = None) -> Value | None:
        """Return what was made of the storage of ``tensor`` in its present version, under ``key``."""
        made = self._made.find(tensor)
        reference = made.get((version_of(tensor), key)) if made is not None else None
        return reference() if reference is not None else None

    def note(self, tensor: Tensor, made: Value, key: Hashable = None) -> None:
        """Remember ``made`` for the storage of ``tensor``, its present version and ``key``, without keeping either."""
        of_storage = self._made.find(tensor)
        if of_storage is None:
            self._made.note(tensor, of_storage := {})
        of_storage[version_of(tensor), key] = weakref.ref(made)

    def clear(self) -> None:
        """Forget everything."""
        self._made.clear()
