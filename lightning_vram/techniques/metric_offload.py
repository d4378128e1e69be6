"""States of metrics, which grow with every batch, in host memory. May import: core, memory.

A metric that needs all samples at once (AUROC, average precision) collects them in lists.
"""

from collections import deque
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_vram.core.tensors.properties import iterate_leaves
from lightning_vram.private_names.torch import tree_map

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
        self._looks.append(
            {
                name: _device_bytes(value, self._device)
                for name, value in vars(self._module).items()
                if isinstance(value, list | dict | deque) and name not in _OF_MODULES
            }
        )
        if len(self._looks) < _NUM_LOOKS:
            return []
        found = []
        for name, total_bytes in self._looks[-1].items():
            first, second = (look.get(name, 0) for look in self._looks[:-1])
            growth_bytes = total_bytes - second
            if first < second and growth_bytes >= _LEAST_GROWTH_BYTES:
                found.append(GrowingList(name, total_bytes, growth_bytes))
        return found


def _device_bytes(tree: Any, device: torch.device) -> int:
    """Bytes of the memory that tensors in ``tree`` are views of, each counted once."""
    tensors = [leaf for leaf in iterate_leaves(tree) if isinstance(leaf, Tensor) and leaf.device == device]
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


# As long as the ranks' own group: where one is closed, torch makes the next of the same ranks under the same name,
# finds the addresses of the closed one, and fails.
_made: WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = WeakKeyDictionary()


def host_group(group: dist.ProcessGroup | None = None) -> dist.ProcessGroup | None:
    """Return a group that takes tensors on the host: ``group`` itself if it does, else one over gloo.

    The first call for a group is a collective over its ranks. ``None`` means all ranks, and is returned if there is
    only one process.
    """
    group = group or dist.group.WORLD
    if group is None or any(part.startswith("cpu:") for part in dist.get_backend_config(group).split(",")):
        return group
    if group not in _made:
        ranks = dist.get_process_group_ranks(group)
        _made[group] = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)  # other ranks do not come
    return _made[group]


_HOST = torch.device("cpu")


def keep_on_host(items: list[Any], *, looks_at_all: bool = False) -> None:
    """Move what was added at the end of a list to the host, in place: others may hold the list itself.

    Tensors leave their graphs. Each copy waits for the device.
    """
    for place in reversed(range(len(items))):
        if all(map(_is_saved, iterate_leaves(items[place]))):
            if not looks_at_all:
                return  # so are all before it
        else:
            items[place] = tree_map(lambda leaf: leaf if _is_saved(leaf) else leaf.detach().to(_HOST), items[place])


def copy_to(device: torch.device, tree: Any) -> Any:
    """Return a nest with its tensors on ``device``; those that are there are not copied."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def _is_saved(leaf: object) -> bool:
    return not isinstance(leaf, Tensor) or (leaf.device == _HOST and not leaf.requires_grad)
