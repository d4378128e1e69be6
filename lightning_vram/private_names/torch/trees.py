"""Nests of containers, as torch takes them apart.

* ``torch.utils._pytree``: what takes them apart, and puts them together | 2.11 - | nothing works
"""

from torch.utils._pytree import tree_flatten, tree_is_leaf, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = ["tree_flatten", "tree_is_leaf", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
