"""Put the attributes of a module back, in the very objects that held them.

Others hold on to these objects: the handle of a hook refers to the dict it is in, a logger to the list it reads. So
lists, dicts and the like (also inside of one another) get their former content back; they are not replaced by copies.
Of more than a thousand items only what was added is taken back, as looking at all of them would cost more than it is
worth. What cannot be seen: objects of other kinds that change inside.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

_DICTS = frozenset((dict, OrderedDict, defaultdict, Counter))
_CONTAINERS = _DICTS | {list, set, deque}
_MAX_ITEMS = 1000
_MAX_DEPTH = 4

Undo = Callable[[], None]


class AttributeState:
    """All attributes of one module: modes, hooks, registries of parameters, buffers and children, and its own.

    Args:
        module: Whose. Children have their own state.
        max_items: Containers with more items lose what was added to them, and nothing else.
    """

    __slots__ = ("_attributes", "_empty", "_kind", "_max_items", "_module", "_parameters", "_undos")

    def __init__(self, module: nn.Module, max_items: int = _MAX_ITEMS) -> None:
        self._module = module
        self._kind = type(module)
        self._max_items = max_items
        attributes = vars(module)
        self._attributes = attributes.copy()
        self._parameters: dict[str, Tensor | None] = attributes["_parameters"].copy()
        self._empty: list[Any] = []  # most are: a module has a dozen registries of hooks
        self._undos: list[Undo] = []
        for name, value in attributes.items():
            kind = type(value)
            if kind in _CONTAINERS:
                if not value:
                    self._empty.append(value)
                elif name != "_parameters":
                    self._note(value, depth=0)
            elif kind is torch.Generator:  # not isinstance: torch.Generator's is slow
                self._undos.append(_keep_position(value))

    def restore(self) -> None:
        """Put everything back. May be called again."""
        if type(self._module) is not self._kind:  # a lazy layer that got its weights became another
            return
        now = vars(self._module)
        now.update(self._attributes)
        for name in [name for name in now if name not in self._attributes]:
            del now[name]
        for container in self._empty:
            container.clear()
        for undo in self._undos:
            undo()
        registered = now["_parameters"]
        # FSDP2 moves sharded and unsharded parameters in and out itself.
        if not any(_is_sharded(parameter) for parameter in (*registered.values(), *self._parameters.values())):
            _refill(registered, self._parameters)

    def _note(self, value: Any, depth: int) -> None:
        if len(value) > self._max_items:
            if type(value) not in (set, deque):
                self._undos.append(_keep_length(value))
            return
        self._undos.append(_keep_content(value))
        if type(value) is set or depth == _MAX_DEPTH:
            return
        for item in value.values() if type(value) in _DICTS else value:
            if type(item) in _CONTAINERS:
                self._note(item, depth + 1)


def _keep_content(container: Any) -> Undo:
    content = container.copy()
    return lambda: _refill(container, content)


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if type(container) in (list, deque):
        container.extend(content)
    else:
        container.update(content)


def _keep_length(container: Any) -> Undo:
    length = len(container)

    def shorten() -> None:
        if type(container) is list:
            del container[length:]
            return
        for name in list(container)[length:]:  # what was added last stands last
            del container[name]

    return shorten


def _keep_position(generator: torch.Generator) -> Undo:
    state = generator.get_state()

    def rewind() -> None:
        generator.set_state(state)

    return rewind


def _is_sharded(parameter: Tensor | None) -> bool:
    return type(parameter) is not nn.Parameter and isinstance(parameter, DTensor)  # the first is quick
