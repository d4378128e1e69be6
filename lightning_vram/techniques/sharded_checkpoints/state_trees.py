"""State dicts as trees: dicts, lists and tuples with tensors and other values for leaves."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_vram.private_names.fsdp2.sharded_tensors import wrap_like


def map_leaves(tree: Any, convert: Callable[[Any], Any]) -> Any:
    """Build the same tree with other leaves; it shares no dict, list or tuple with the old one.

    Classes of dicts and their attributes stay, such as the ``_metadata`` of a state dict.
    """
    if isinstance(tree, dict):
        mapped = copy.copy(tree)
        for key, value in tree.items():
            mapped[key] = map_leaves(value, convert)
        return mapped
    if type(tree) in (list, tuple):
        return type(tree)(map_leaves(value, convert) for value in tree)
    return convert(tree)


def snapshot(tree: Any) -> Any:
    """Copy a tree to the host, so that nothing that happens later shows in it. Sharded tensors stay sharded."""
    return map_leaves(tree, _copy_leaf)


def count_bytes(tree: Any) -> int:
    """Count the bytes of all tensors of a tree, sharded ones with the parts of all ranks, each tensor once."""
    sizes: dict[int, int] = {}
    waiting = [tree]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Tensor):
            sizes[id(part)] = part.numel() * part.element_size()
        elif isinstance(part, dict):
            waiting += part.values()
        elif type(part) in (list, tuple):
            waiting += part
    return sum(sizes.values())


def copy_to_host(tensor: Tensor) -> Tensor:
    """Copy a plain tensor, detached."""
    return tensor.detach().to("cpu", copy=True)


def _copy_leaf(leaf: Any) -> Any:
    if isinstance(leaf, DTensor):
        with torch.no_grad():
            return wrap_like(copy_to_host(leaf.to_local()), leaf)
    if isinstance(leaf, Tensor):
        return copy_to_host(leaf)
    return copy.deepcopy(leaf)
