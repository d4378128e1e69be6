"""Find lists on a module that hold more of a device's memory after each batch: outputs that a user collects."""

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_vram.core.tensors.nests import iterate_leaves

_NUM_LOOKS = 3
_LEAST_GROWTH_BYTES = 1024  # a loss per batch is not worth a word
_OF_MODULES = frozenset(vars(nn.Module()))  # registries of parameters, buffers, hooks


class GrowingList(NamedTuple):
    """What was found."""

    name: str  # of the attribute
    total_bytes: int  # of its tensors on the device
    growth_bytes: int  # of them, of the last batch


class GrowingLists:
    """Looks three times, after a batch each."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module = module  # whose own attributes are looked at: lists, dicts and deques, and what is in them
        self._device = device
        self._looks: list[dict[str, int]] = []

    def look(self) -> list[GrowingList]:
        """Return at the third call what has grown each time, by 1 KiB at least; else nothing."""
        if len(self._looks) == _NUM_LOOKS:
            return []
        self._looks.append(_bytes_by_name(self._module, self._device))
        if len(self._looks) < _NUM_LOOKS:
            return []
        found = []
        for name, total_bytes in self._looks[-1].items():
            first, second = (look.get(name, 0) for look in self._looks[:-1])
            growth_bytes = total_bytes - second
            if first < second and growth_bytes >= _LEAST_GROWTH_BYTES:
                found.append(GrowingList(name, total_bytes, growth_bytes))
        return found


def _bytes_by_name(module: nn.Module, device: torch.device) -> dict[str, int]:
    return {
        name: _device_bytes(value, device)
        for name, value in vars(module).items()
        if isinstance(value, list | dict | deque) and name not in _OF_MODULES
    }


def _device_bytes(tree: Any, device: torch.device) -> int:
    """Bytes of the memory that tensors in ``tree`` are views of, each counted once."""
    tensors = [leaf for leaf in iterate_leaves(tree) if isinstance(leaf, Tensor) and leaf.device == device]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
