"""Flatten, iterate and cast what modules take and return."""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.private_names.torch.trees import tree_flatten, tree_is_leaf, tree_leaves, tree_map, tree_unflatten

Rebuild = Callable[[Sequence[Any]], Any]


def flatten_arguments(arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> tuple[list[Any], Rebuild]:
    """Return the leaves of positional and keyword arguments, and a function that rebuilds them from as many others."""
    args, kwargs = arguments
    values = [*args, *kwargs.values()]
    if all(map(tree_is_leaf, values)):
        return values, partial(_make_arguments, len(args), tuple(kwargs))
    leaves, structure = tree_flatten(arguments)
    return leaves, partial(tree_unflatten, treespec=structure)


def flatten_output(output: Any) -> tuple[list[Any], Rebuild]:
    """Return the leaves of an output, and a function that rebuilds it from as many others."""
    if isinstance(output, Tensor):
        return [output], itemgetter(0)
    if type(output) is tuple and all(map(tree_is_leaf, output)):
        return list(output), tuple
    leaves, structure = tree_flatten(output)
    return leaves, partial(tree_unflatten, treespec=structure)


def _make_arguments(num_args: int, names: tuple[str, ...], leaves: Sequence[Any]) -> Any:
    return tuple(leaves[:num_args]), dict(zip(names, leaves[num_args:], strict=True))


def iterate_leaves(tree: Any, _open: frozenset[int] = frozenset()) -> Iterator[Any]:
    """Yield the leaves of a pytree, those in the fields of its dataclasses included."""
    if isinstance(tree, Tensor):  # what most modules take
        yield tree
        return
    for leaf in tree_leaves(tree, is_leaf=_is_opened):
        if _is_opened(leaf):
            if id(leaf) not in _open:  # else it holds itself
                yield from iterate_leaves(_read(leaf), _open | {id(leaf)})
        else:
            yield leaf


def cast_where(
    is_meant: Callable[[object], bool], dtype: torch.dtype, tree: Any, _open: frozenset[int] = frozenset()
) -> Any:
    """Return ``tree`` with its tensors that ``is_meant`` accepts cast; what does not change is returned itself."""
    if isinstance(tree, Tensor):
        return tree.to(dtype) if is_meant(tree) else tree
    if not any(is_meant(leaf) for leaf in iterate_leaves(tree, _open)):
        return tree

    def cast(leaf: Any) -> Any:
        if _is_opened(leaf):
            return leaf if id(leaf) in _open else _cast_fields(is_meant, dtype, leaf, _open | {id(leaf)})
        return leaf.to(dtype) if is_meant(leaf) else leaf

    return tree_map(cast, tree, is_leaf=_is_opened)


def _cast_fields(is_meant: Callable[[object], bool], dtype: torch.dtype, data: Any, under_way: frozenset[int]) -> Any:
    values = _read(data)
    changed = {name: cast_where(is_meant, dtype, value, under_way) for name, value in values.items()}
    if all(changed[name] is value for name, value in values.items()):
        return data
    twin = copy.copy(data)  # not by its __init__: checks and computed fields ran once
    for name, value in changed.items():
        object.__setattr__(twin, name, value)  # frozen ones too
    return twin


def _read(data: Any) -> dict[str, Any]:
    return {field.name: getattr(data, field.name) for field in fields(data) if hasattr(data, field.name)}


def _is_opened(leaf: object) -> bool:
    """Whether ``leaf`` is an object with fields. Registered classes (transformers' outputs) are opened by torch."""
    return is_dataclass(leaf) and not isinstance(leaf, type | nn.Module | Tensor) and tree_is_leaf(leaf)
