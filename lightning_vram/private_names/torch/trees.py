"""Nests of containers, as torch takes them apart.

* ``torch.utils._pytree``: what takes them apart, and puts them together | 2.11 - | nothing works
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = ["tree_flatten", "tree_is_leaf", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Find the tensors in a tree of arguments or results."""
    if isinstance(tree, Tensor):  # the common case, without the cost of flattening
        return iter((tree,))
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
