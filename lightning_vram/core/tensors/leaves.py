"""Take nests of arguments and results apart without litter.

``tree_flatten`` makes a function that refers to itself for every call: garbage that only the cyclic collector finds,
dozens of times per layer and step. What layers and operators take and return is flat nearly always.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from lightning_vram.private_names.torch.trees import tree_flatten, tree_is_leaf, tree_unflatten

Rebuild = Callable[[Sequence[Any]], Any]


def flatten_arguments(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[list[Any], Rebuild]:
    """Return the leaves of positional and keyword arguments, and what makes arguments of as many others."""
    args, kwargs = arguments
    values = [*args, *kwargs.values()]
    if all(map(tree_is_leaf, values)):
        return values, partial(_make_arguments, len(args), tuple(kwargs))
    leaves, structure = tree_flatten(arguments)
    return leaves, partial(_unflatten, structure)


def flatten_output(output: Any) -> tuple[list[Any], Rebuild]:
    """Return the leaves of what was returned, and what makes the like of as many others."""
    if isinstance(output, Tensor):
        return [output], _first
    if type(output) is tuple and all(map(tree_is_leaf, output)):
        return list(output), tuple
    leaves, structure = tree_flatten(output)
    return leaves, partial(_unflatten, structure)


def _first(leaves: Sequence[Any]) -> Any:
    return leaves[0]


def _make_arguments(num_args: int, names: tuple[str, ...], leaves: Sequence[Any]) -> Any:
    return tuple(leaves[:num_args]), dict(zip(names, leaves[num_args:], strict=True))


def _unflatten(structure: Any, leaves: Sequence[Any]) -> Any:
    return tree_unflatten(leaves, structure)
