"""Lists of tensors that stay in host memory, whatever is added to them."""

from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.tensors.nests import iterate_leaves
from lightning_vram.private_names.torch.trees import tree_map

_HOST = torch.device("cpu")


def keep_on_host(items: list[Any], *, looks_at_all: bool = False) -> None:
    """Move what was added at the end of a list to the host, in place: others may hold the list itself.

    Tensors leave their graphs. Each copy waits for the device.
    """
    for place in reversed(range(len(items))):
        if all(map(_is_kept, iterate_leaves(items[place]))):
            if not looks_at_all:
                return  # so are all before it
        else:
            items[place] = tree_map(_to_host, items[place])


def copy_to(device: torch.device, tree: Any) -> Any:
    """Return a nest with its tensors on ``device``; those that are there are not copied."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def _is_kept(leaf: object) -> bool:
    return not isinstance(leaf, Tensor) or (leaf.device == _HOST and not leaf.requires_grad)


def _to_host(leaf: Any) -> Any:
    return leaf if _is_kept(leaf) else leaf.detach().to(_HOST)
