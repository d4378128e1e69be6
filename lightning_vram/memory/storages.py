"""Storages of tensors, and facts about them.

A fact belongs to the memory of a tensor, for any view of it, and holds as long as the storage lives.
"""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_vram.private_names import torch as private
from lightning_vram.private_names.dispatcher import is_traceable_wrapper_subclass


def iterate_storages(tensor: Tensor) -> Iterator[tuple[torch.UntypedStorage, torch.device]]:
    """Yield each storage of ``tensor`` (opaque layouts have none), and the tensor's device: a fake's is on ``meta``."""
    if is_lazy(tensor):
        return  # no storage yet
    wrapper: Any = tensor
    if is_traceable_wrapper_subclass(wrapper):
        for name in wrapper.__tensor_flatten__()[0]:
            part = getattr(wrapper, name)
            if isinstance(part, Tensor):  # a DTensor names its device mesh as well
                yield from iterate_storages(part)
    elif tensor.layout is torch.strided:
        try:
            storage = tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return
        yield storage, tensor.device
    else:
        for part in _sparse_parts(tensor):
            yield from iterate_storages(part)


def _sparse_parts(tensor: Tensor) -> tuple[Tensor, ...]:
    if tensor.layout is torch.sparse_coo:
        return private.sparse_indices(tensor), private.sparse_values(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices(), tensor.values()
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return tensor.ccol_indices(), tensor.row_indices(), tensor.values()
    return ()


def iterate_tensors(nest: Any) -> Iterator[Tensor]:
    """Yield the tensors of a batch: any nest of containers, mappings, dataclasses and other objects with attributes."""
    for leaf in private.tree_leaves(nest):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):  # not every mapping is a dict: transformers' BatchEncoding
            yield from iterate_tensors(list(leaf.values()))
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type | torch.nn.Module) and not callable(leaf):
            yield from iterate_tensors(list(vars(leaf).values()))


NO_VERSION = -1


def version_of(tensor: Tensor) -> int:
    """Return how often ``tensor`` was written to; :data:`NO_VERSION` if it is an inference tensor, which has none."""
    try:
        return private.num_writes(tensor)
    except RuntimeError:
        return NO_VERSION


def storage_address(tensor: Tensor) -> int:
    """Return what all views of one memory have in common; 0 for tensors without one piece of memory (sparse)."""
    try:
        return private.storage_identity(tensor)
    except (NotImplementedError, RuntimeError):
        return 0


Value = TypeVar("Value")
_FEWEST_TO_PRUNE = 64


class ByStorage(Generic[Value]):
    """One fact for each storage. It keeps no storage alive.

    Args:
        on_death: Called with the fact when its storage dies. ``None``: the dead are dropped as their number grows.
    """

    def __init__(self, on_death: Callable[[Value], None] | None = None) -> None:
        # By address. It is used again after a storage's death, which the weak reference shows.
        self._noted: dict[int, tuple[weakref.ref[torch.UntypedStorage], Value]] = {}
        self._on_death = on_death
        self._prune_at = _FEWEST_TO_PRUNE

    def __len__(self) -> int:
        return len(self._noted)

    def find(self, tensor: Tensor) -> Value | None:
        """Return the fact for the memory of ``tensor``; ``None`` also if that is not one piece (sparse)."""
        try:
            # not storage_address(): this runs for every operator
            noted = self._noted.get(private.storage_identity(tensor))
        except (NotImplementedError, RuntimeError):
            return None
        return noted[1] if noted is not None and noted[0]() is not None else None

    def find_storage(self, storage: torch.UntypedStorage) -> Value | None:
        """Return the fact for ``storage``."""
        reference, value = self._noted.get(private.storage_key(storage), (None, None))
        return value if reference is not None and reference() is not None else None

    def note(self, tensor: Tensor, value: Value) -> None:
        """Set the fact for the memory of ``tensor``, if it is one piece."""
        if storage_address(tensor):
            self.note_storage(tensor.untyped_storage(), value)

    def note_storage(self, storage: torch.UntypedStorage, value: Value) -> None:
        """Set the fact for ``storage``."""
        key = private.storage_key(storage)
        self._noted[key] = weakref.ref(storage, self._bury(key) if self._on_death is not None else None), value
        if self._on_death is None and len(self._noted) >= self._prune_at:
            for dead in [key for key, (reference, _) in list(self._noted.items()) if reference() is None]:
                self._noted.pop(dead, None)  # a list and a default: another thread may note something
            self._prune_at = max(_FEWEST_TO_PRUNE, 2 * len(self._noted))

    def items(self) -> Iterator[tuple[torch.UntypedStorage, Value]]:
        """Yield the storages that are alive, with their facts."""
        for reference, value in list(self._noted.values()):
            storage = reference()
            if storage is not None:
                yield storage, value

    def values(self) -> list[Value]:
        """Return all facts, perhaps of dead storages, too."""
        return [value for _, value in list(self._noted.values())]

    def drop(self, tensor: Tensor) -> None:
        """Forget what was noted for the memory of ``tensor``."""
        self._noted.pop(storage_address(tensor), None)

    def drop_storage(self, storage: torch.UntypedStorage) -> None:
        """Forget what was noted for ``storage``."""
        self._noted.pop(private.storage_key(storage), None)

    def clear(self) -> None:
        """Forget everything; no death is reported any more."""
        self._noted.clear()

    def _bury(self, key: int) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        def bury(reference: weakref.ref[torch.UntypedStorage]) -> None:
            noted = self._noted.get(key)
            if noted is not None and noted[0] is reference and self._on_death is not None:
                del self._noted[key]
                self._on_death(noted[1])

        return bury
