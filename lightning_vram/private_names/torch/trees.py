"""Nests of containers, as torch takes them apart."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = ["tree_flatten", "tree_is_leaf", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]

_LEAVES = frozenset({type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout})


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Find the tensors in a tree of arguments or results."""
    found: list[Tensor] = []
    _collect(tree, found)
    return iter(found)


def _collect(tree: Any, found: list[Tensor]) -> None:
    """Each operator's arguments are gone through several times: what they are made of is not looked up."""
    kind = type(tree)
    if isinstance(tree, Tensor):
        found.append(tree)
    elif kind is tuple or kind is list:
        for part in tree:
            _collect(part, found)
    elif kind is dict:
        for part in tree.values():
            _collect(part, found)
    elif kind not in _LEAVES:
        found.extend(leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
