"""Storages that were allocated in a watched step: where, and which of them are alive later."""

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from lightning_vram.memory.tracking.storages import iterate_storages
from lightning_vram.private_names.torch.tensors import storage_key

_LIBRARIES = sys.stdlib_module_names | {
    *("torch", "torchmetrics", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_vram"),
}


@dataclass(frozen=True)
class Site:
    """Where a storage was made."""

    module: str = ""  # name of the innermost module whose forward ran; empty for the root and outside of any
    # ``"model.py:42 in training_step"``, the innermost line of the user's; empty where there was none, such as in the
    # backward
    line: str = ""

    def __str__(self) -> str:
        """``net.0, model.py:42 in training_step``."""
        return ", ".join(filter(None, [self.module, self.line])) or "place unknown"


class Births:
    """The storages that one step allocated, by weak references."""

    def __init__(self) -> None:
        self._noted: dict[int, tuple[weakref.ref[torch.UntypedStorage], Site]] = {}
        self.nodes = range(0)  # of the graph, by number

    def add(self, storage: torch.UntypedStorage, site: Site) -> None:
        """Note a storage, unless it is known."""
        key = storage_key(storage)
        known = self._noted.get(key)
        if known is None or known[0]() is None:  # else its address is used again
            self._noted[key] = (weakref.ref(storage), site)

    def alive(self) -> dict[int, tuple[int, Site]]:
        """Return bytes and site of those that are alive, by the key of the storage, and forget the others."""
        found = {}
        for key, (reference, site) in list(self._noted.items()):
            storage = reference()
            if storage is None:
                del self._noted[key]
            else:
                found[key] = (int(storage.nbytes()), site)
        return found

    def forget(self, keys: set[int]) -> None:
        """Take storages out."""
        for key in keys & self._noted.keys():
            del self._noted[key]


def storages_of(tensors: Any) -> Iterator[torch.UntypedStorage]:
    """Yield the storages behind tensors that take memory: not those of fake tensors, which compilers keep."""
    for tensor in tensors:
        if isinstance(tensor, Tensor):
            yield from (storage for storage, _ in iterate_storages(tensor) if storage.device.type != "meta")


def user_frames() -> set[FrameType]:
    """Return the frames that called, those of libraries left out."""
    return set(_frames(sys._getframe(1)))


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES:
            yield frame
        frame = frame.f_back


def line_of_user(outer: set[FrameType]) -> str:
    """Return the innermost line of the user's code that runs now; empty if it is none inside of ``outer`` frames."""
    for frame in _frames(sys._getframe(1)):
        if frame in outer:
            return ""
        if not frame.f_code.co_filename.startswith("<"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""
