"""What the attributes of a module are: containers, generators, tensors. Of most modules it is found out once.

It follows from the names and types of the attributes, which are quick to compare: one that a step replaces or adds is
noticed, and no value is held from step to step.
"""

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.private_names.torch.modules import PARAMETERS

DICTS = frozenset((dict, OrderedDict, defaultdict, Counter))
CONTAINERS = DICTS | {list, set, deque}

_REGISTRIES = list(vars(nn.Module()))  # nearly every module has them first, in this order
_HAS_REGISTRIES_BEHIND = 2
_ARE_REGISTRIES_KNOWN = _REGISTRIES[:_HAS_REGISTRIES_BEHIND] == ["training", PARAMETERS]

Undo = Callable[[], object]


class AttributeLayout:
    """The kinds of a module's attributes.

    Args:
        names: Of all attributes.
        values: Of all attributes, in the same order.
    """

    __slots__ = ("_kinds", "_start", "containers", "generators", "names", "registries", "tensors")

    def __init__(self, names: list[str], values: list[Any]) -> None:
        self.names = names
        has_registries = _ARE_REGISTRIES_KNOWN and names[: len(_REGISTRIES)] == _REGISTRIES
        self._start = len(_REGISTRIES) if has_registries else 0
        self._kinds = [*map(type, values[self._start :])]
        self.registries = slice(_HAS_REGISTRIES_BEHIND, self._start)
        """Where the dicts of buffers, children and hooks are. There is nothing in them that needs a look inside."""
        places = list(enumerate(self._kinds, start=self._start))
        self.containers = [place for place, kind in places if kind in CONTAINERS and names[place] != PARAMETERS]
        """Where other containers are."""
        self.tensors = [place for place, kind in places if kind is Tensor]
        keepers = position_keepers()
        self.generators = [(place, keepers[kind]) for place, kind in places if kind in keepers]
        """Where generators are, and what keeps their position."""

    def fits(self, names: list[str], values: list[Any]) -> bool:
        """Whether these attributes have the same names and types."""
        return names == self.names and [*map(type, values[self._start :])] == self._kinds


def position_keepers() -> Mapping[type, Callable[[Any], Undo]]:
    """Return for each kind of generator what reads its position, and returns what goes back there."""
    return _position_keepers(sys.modules.get("numpy.random"))  # torch works without it


@cache
def _position_keepers(numpy_random: ModuleType | None) -> dict[type, Callable[[Any], Undo]]:
    keepers: dict[type, Callable[[Any], Undo]] = {torch.Generator: _keep_of_torch, random.Random: _keep_of_python}
    if numpy_random is not None:
        keepers |= {numpy_random.Generator: _keep_of_numpy, numpy_random.RandomState: _keep_of_old_numpy}
    return keepers


def _keep_of_torch(generator: torch.Generator) -> Undo:
    state = generator.get_state()
    return lambda: generator.set_state(state)


def _keep_of_python(generator: random.Random) -> Undo:
    state = generator.getstate()
    return lambda: generator.setstate(state)


def _keep_of_numpy(generator: Any) -> Undo:
    source, state = generator.bit_generator, generator.bit_generator.state
    return lambda: setattr(source, "state", state)


def _keep_of_old_numpy(generator: Any) -> Undo:
    state = generator.get_state(legacy=False)
    return lambda: generator.set_state(state)
