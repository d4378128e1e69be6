"""All modules of a model, told apart for taking their state: torch's own simple layers, and others.

A simple layer has no buffers, children or hooks, and computes with what torch gave it: only its mode, its parameters
and what others set on it can change. Half of most models are such layers; their state is taken for all together, which
costs a few tenths of a microsecond for each. Which they are is found out once, and again when the model changes.
"""

from collections.abc import Callable, Sequence
from itertools import chain, repeat
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.core.rollback.attribute_state import AttributeLayout, AttributeState, put_parameters_back
from lightning_vram.private_names.torch.modules import CHILDREN, HOOK_KIND, PARAMETERS

_REGISTRIES = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)}
_IMMUTABLE = (bool, int, float, str, torch.dtype, torch.device, torch.Size)
_read_registries = itemgetter(*_REGISTRIES - {PARAMETERS})

Skip = Callable[[nn.Module], bool]


class LeafStates:
    """The attributes of simple layers.

    Args:
        leaves: The layers.
        attributes: Their ``vars``.
    """

    def __init__(self, leaves: Sequence[nn.Module], attributes: Sequence[dict[str, Any]]) -> None:
        self._leaves = leaves
        self._kinds = [*map(type, leaves)]
        self._attributes = [*map(dict.copy, attributes)]
        self._parameters: list[dict[str, Tensor | None]] = [one[PARAMETERS].copy() for one in attributes]

    def restore(self) -> None:
        """Put everything back. May be called again."""
        for leaf, kind, before, parameters in zip(
            self._leaves, self._kinds, self._attributes, self._parameters, strict=True
        ):
            if type(leaf) is not kind:
                continue
            now = vars(leaf)
            now.update(before)
            for name in [name for name in now if name not in before]:
                del now[name]
            for registry in _read_registries(now):  # all were empty
                registry.clear()
            put_parameters_back(now[PARAMETERS], parameters)


class ModuleRoster:
    """The modules of a model whose state is taken.

    Args:
        members: All modules.
        skip: Those that are left out.
    """

    def __init__(self, members: Sequence[nn.Module], skip: Skip | None) -> None:
        self._members = members
        self._leaves = [leaf for leaf in members if _is_simple_leaf(leaf) and not (skip and skip(leaf))]
        simple = set(map(id, self._leaves))
        self._others = [member for member in members if id(member) not in simple]
        self._attributes = [*map(vars, self._leaves)]
        self._counts = [*map(len, self._attributes)]
        self._layouts: list[AttributeLayout] = []

    def fits(self, members: Sequence[nn.Module]) -> bool:
        """Whether these are the members, and the simple layers among them still are simple."""
        return (
            len(members) == len(self._members)
            and all(map(is_, members, self._members))
            and [*map(len, self._attributes)] == self._counts
            and not any(map(any, map(_read_registries, self._attributes)))
        )

    def take(self, skip: Skip | None) -> tuple[LeafStates, list[AttributeState]]:
        """Return the state of the simple layers, and that of each other module that is not skipped."""
        others = self._others if skip is None else [other for other in self._others if not skip(other)]
        known = chain(self._layouts, repeat(None))
        states = [AttributeState(other, layout=layout) for other, layout in zip(others, known, strict=False)]
        self._layouts = [state.layout for state in states]
        return LeafStates(self._leaves, self._attributes), states


def iterate_members(*modules: nn.Module) -> list[nn.Module]:
    """Return ``modules`` and all modules in them, each once; quicker than ``modules()``, which hashes by state."""
    waiting = list({id(module): module for module in modules}.values())
    seen = set(map(id, waiting))
    members: list[nn.Module] = []
    while waiting:
        member = waiting.pop()
        members.append(member)
        children = vars(member)[CHILDREN]
        if children:
            for child in children.values():
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    waiting.append(child)
    return members


def _is_simple_leaf(module: nn.Module) -> bool:
    attributes = vars(module)
    if not type(module).__module__.startswith("torch.nn.modules.") or not attributes.keys() >= _REGISTRIES:
        return False
    own = [value for name, value in attributes.items() if name not in _REGISTRIES and name != HOOK_KIND]
    return not any(_read_registries(attributes)) and all(map(_is_immutable, own))


def _is_immutable(value: object) -> bool:
    """Whether nothing in it can change; not ``None``, in whose place something else may be put later."""
    return isinstance(value, _IMMUTABLE) or (type(value) is tuple and all(map(_is_immutable, value)))
