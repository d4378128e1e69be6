"""Measure what a forward saves for its backward, in eager and in compiled code."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lightning_vram.memory.tracking.storages import iterate_storages
from lightning_vram.private_names.torch.tensors import storage_key


class KeptBytes:
    """Counts memory that autograd saves, each storage once while it lives, except that of ``others``.

    By saved-tensor hooks: a dispatch mode would make compiled code run uncompiled.
    """

    def __init__(self, others: Iterable[Tensor]) -> None:
        self._others = {storage_key(storage) for tensor in others for storage, _ in iterate_storages(tensor)}
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._num_bytes = 0
        self.peak_bytes = 0

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what is saved inside."""
        with saved_tensors_hooks(self._pack, _unpack):
            yield

    def _pack(self, tensor: Tensor) -> Tensor:
        for storage, _ in iterate_storages(tensor):
            key = storage_key(storage)
            if key not in self._others and key not in self._alive:
                self._add(key, storage, storage.nbytes())
        return tensor

    def _add(self, key: int, storage: torch.UntypedStorage, num_bytes: int) -> None:
        def forget(_: object) -> None:
            del self._alive[key]
            self._num_bytes -= num_bytes

        self._alive[key] = weakref.ref(storage, forget)
        self._num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self._num_bytes)


def _unpack(tensor: Tensor) -> Tensor:
    return tensor
