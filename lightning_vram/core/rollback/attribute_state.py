"""Put the attributes of a module back, in the very objects that held them.

Others hold on to these objects: the handle of a hook refers to the dict it is in, a logger to the list it reads. So
lists, dicts and the like (also inside of one another) get their former content back; they are not replaced by copies.
Generators of torch, NumPy and Python go back to their positions, in containers as well.

Of containers with more than a thousand items nothing inside is looked at, as that would cost more than it is worth:
from lists and dicts only what was added at the end is taken away, sets and deques get their items back up to ten
thousand, and larger ones stay as they are. What cannot be seen: objects of other kinds that change inside.
"""

from collections import deque
from functools import partial
from typing import Any

from torch import Tensor, nn

from lightning_vram.core.rollback.attribute_layout import CONTAINERS, DICTS, AttributeLayout, Undo, position_keepers
from lightning_vram.core.tensors.shards import is_shard
from lightning_vram.private_names.torch.modules import PARAMETERS

_MAX_ITEMS = 1000
_MAX_COPIED_ITEMS = 10_000
_MAX_DEPTH = 4


class AttributeState:
    """All attributes of one module: modes, hooks, registries of parameters, buffers and children, and its own.

    Args:
        module: Whose. Children have their own state.
        max_items: In containers with more items nothing is looked at.
        layout: That of an earlier state, to save looking for what needs to be kept. One that does not fit is ignored.
    """

    __slots__ = ("_kind", "_max_items", "_module", "_notes", "_parameters", "_values", "layout")

    def __init__(self, module: nn.Module, max_items: int = _MAX_ITEMS, layout: AttributeLayout | None = None) -> None:
        attributes = vars(module)
        names, values = [*attributes], [*attributes.values()]
        if layout is None or not layout.fits(names, values):
            layout = AttributeLayout(names, values)
        self.layout = layout
        self._module = module
        self._kind = type(module)
        self._max_items = max_items
        self._values = values
        registered = attributes[PARAMETERS]
        self._parameters = registered.copy() if type(registered) in DICTS else None  # not of a scripted module
        self._notes: list[tuple[Any, Undo | None]] = [  # what is not empty, and how it gets its content back
            (registry, _keep_content(registry))
            for registry in filter(None, values[layout.registries])
            if type(registry) in CONTAINERS
        ]
        for place in layout.containers:
            if values[place]:
                self._note(values[place], depth=0)
        for place, keep in layout.generators:
            self._notes.append((values[place], keep(values[place])))

    def tensors(self) -> list[Tensor]:
        """Return the attributes that are plain tensors."""
        return [self._values[place] for place in self.layout.tensors]

    def restore(self) -> None:
        """Put everything back. May be called again."""
        if type(self._module) is not self._kind:  # a lazy layer that got its weights became another
            return
        now = vars(self._module)
        before = dict(zip(self.layout.names, self._values, strict=True))
        now.update(before)
        for name in [name for name in now if name not in before]:
            del now[name]
        registered = now[PARAMETERS]
        had_content = {id(container) for container, _ in self._notes} | {id(registered)}
        for container in self._values:
            if type(container) in CONTAINERS and id(container) not in had_content:
                container.clear()
        for _, undo in self._notes:
            if undo is not None:
                undo()
        if self._parameters is not None:
            put_parameters_back(registered, self._parameters)

    def _note(self, container: Any, depth: int) -> None:
        kind = type(container)
        if len(container) > self._max_items:
            self._notes.append((container, _keep_what_is_cheap(container)))
            return
        self._notes.append((container, _keep_content(container)))
        if kind is set or depth == _MAX_DEPTH:
            return
        keepers = position_keepers()
        for item in container.values() if kind in DICTS else container:
            if type(item) in CONTAINERS:
                self._note(item, depth + 1)
            elif type(item) in keepers:
                self._notes.append((item, keepers[type(item)](item)))


def put_parameters_back(registered: dict[str, Tensor | None], before: dict[str, Tensor | None]) -> None:
    """Fill the dict in which a module has its parameters with those from before."""
    # FSDP2 moves sharded and unsharded parameters in and out itself.
    if not any(map(is_shard, (*registered.values(), *before.values()))):
        _refill(registered, before)


def _keep_content(container: Any) -> Undo:
    return partial(_refill, container, container.copy())


def _refill(container: Any, content: Any) -> None:
    container.clear()
    if type(container) in (list, deque):
        container.extend(content)
    else:
        container.update(content)


def _keep_what_is_cheap(container: Any) -> Undo | None:
    length = len(container)
    if type(container) in (set, deque):
        return _keep_content(container) if length <= _MAX_COPIED_ITEMS else None

    def shorten() -> None:
        if type(container) is list:
            del container[length:]
            return
        for name in list(container)[length:]:  # what was added last stands last
            del container[name]

    return shorten
