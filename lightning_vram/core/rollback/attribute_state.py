"""The state of a module, to restore: its attributes, and its buffers."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, repeat
from operator import is_
from typing import Any

from torch import Tensor, nn

from lightning_vram.core.random_state.sources import own_sources
from lightning_vram.core.tensors.shards import is_shard
from lightning_vram.private_names.torch.modules import CHILDREN, PARAMETERS

_MAX_ITEMS = 1000
_MAX_COPIED_ITEMS = 10_000
_MAX_DEPTH = 4

_DICTS = frozenset((dict, OrderedDict, defaultdict, Counter))
_CONTAINERS = _DICTS | {list, set, deque}

_REGISTRIES = list(vars(nn.Module()))  # nearly every module has them first, in this order
_HAS_REGISTRIES_BEHIND = 2
_ARE_REGISTRIES_KNOWN = _REGISTRIES[:_HAS_REGISTRIES_BEHIND] == ["training", PARAMETERS]

Undo = Callable[[], object]


class AttributeLayout:
    """Which attributes of a module are containers, generators and tensors. Of most modules it is computed once.

    It follows from names and types, which are quick to compare: an attribute that a step replaces or adds is noticed,
    and no value is held from step to step.
    """

    __slots__ = ("containers", "generators", "kinds", "names", "registries", "start", "tensors")

    def __init__(self, names: list[str], values: list[Any]) -> None:
        self.names = names
        has_registries = _ARE_REGISTRIES_KNOWN and names[: len(_REGISTRIES)] == _REGISTRIES
        self.start = len(_REGISTRIES) if has_registries else 0
        self.kinds = [*map(type, values[self.start :])]
        """Of the attributes behind the registries, which start there."""
        self.registries = slice(_HAS_REGISTRIES_BEHIND, self.start)
        """Where the dicts of buffers, children and hooks are. There is nothing in them that needs a look inside."""
        places = list(enumerate(self.kinds, start=self.start))
        self.containers = [place for place, kind in places if kind in _CONTAINERS and names[place] != PARAMETERS]
        """Where other containers are."""
        self.tensors = [place for place, kind in places if issubclass(kind, Tensor)]
        sources = own_sources()
        self.generators = [(place, sources[kind]) for place, kind in places if kind in sources]
        """Where generators are, and what makes their source."""


def take_states(
    members: Sequence[nn.Module], layouts: list[AttributeLayout], *, shortens: bool = True
) -> list["AttributeState"]:
    """Return the state of each member, and put the layouts that were found into ``layouts``."""
    known = chain(layouts, repeat(None))
    states = [
        AttributeState(one, layout=layout, shortens=shortens) for one, layout in zip(members, known, strict=False)
    ]
    layouts[:] = [state.layout for state in states]
    return states


class AttributeState:
    """All attributes of one module, without its children: modes, hooks, registries and its own.

    They are restored in the very objects that held them, since other code holds on to these: the handle of a hook
    refers to the dict it is in, a logger to the list it reads. So lists, dicts and the like (also nested ones) get
    their former content back. Generators of torch, NumPy and Python go back to their positions, in containers as well.
    Of containers with more than ``max_items`` nothing inside is checked, as that would cost too much: if ``shortens``,
    lists and dicts lose what was added at the end, sets and deques get their items back up to ten thousand, and larger
    ones stay as they are. Not detected: objects of other kinds that change inside.

    ``layout``: that of an earlier state, which saves time; one that does not fit is ignored.
    """

    __slots__ = ("_kind", "_max_items", "_notes", "_parameters", "_shortens", "_values", "layout", "module")

    def __init__(
        self,
        module: nn.Module,
        max_items: int = _MAX_ITEMS,
        layout: AttributeLayout | None = None,
        *,
        shortens: bool = True,
    ) -> None:
        attributes = vars(module)
        names, values = [*attributes], [*attributes.values()]
        if layout is None or names != layout.names or [*map(type, values[layout.start :])] != layout.kinds:
            layout = AttributeLayout(names, values)
        self.layout = layout
        self.module = module
        self._kind = type(module)
        self._max_items = max_items
        self._shortens = shortens
        self._values = values
        registered = attributes[PARAMETERS]
        self._parameters = registered.copy() if type(registered) in _DICTS else None  # not of a scripted module
        self._notes: list[tuple[Any, Undo | None]] = []  # what is not empty, and how it gets its content back
        for registry in filter(None, values[layout.registries]):
            if type(registry) in _CONTAINERS:
                self._notes.append((registry, partial(_refill, registry, registry.copy())))
        for place in layout.containers:
            if values[place]:
                self._note(values[place], depth=0)
        for place, source in layout.generators:
            self._notes.append((values[place], _keep_position(source(values[place]))))

    def tensors(self) -> dict[str, Tensor]:
        """Return the attributes that are tensors, by name."""
        return {self.layout.names[place]: self._values[place] for place in self.layout.tensors}

    def restore(self) -> None:
        """Put everything back. May be called again."""
        if type(self.module) is not self._kind:  # a lazy layer that got its weights became another
            return
        now, layout, values = vars(self.module), self.layout, self._values
        if [*now] != layout.names or not all(map(is_, now.values(), values)):
            attributes = dict(zip(layout.names, values, strict=True))
            now.update(attributes)
            for name in [name for name in now if name not in attributes]:
                del now[name]
        filled = [*filter(None, values[layout.registries])]
        for place in layout.containers:
            if values[place]:
                filled.append(values[place])
        if filled or self._notes:
            self._put_content_back(filled)
        registered, before = now[PARAMETERS], self._parameters
        if before is not None and (before or registered) and not _has(registered, before):
            _put_parameters_back(registered, before)

    def _put_content_back(self, filled: list[Any]) -> None:
        had_content = {id(container) for container, _ in self._notes}
        for container in filled:
            if id(container) not in had_content and type(container) in _CONTAINERS:
                container.clear()
        for _, undo in self._notes:
            if undo is not None:
                undo()

    def _note(self, container: Any, depth: int) -> None:
        kind = type(container)
        if len(container) > self._max_items:
            self._notes.append((container, _keep_what_is_cheap(container) if self._shortens else None))
            return
        self._notes.append((container, partial(_refill, container, container.copy())))
        if kind is set or depth == _MAX_DEPTH:
            return
        sources = own_sources()
        for item in container.values() if kind in _DICTS else container:
            if type(item) in _CONTAINERS:
                self._note(item, depth + 1)
            elif type(item) in sources:
                self._notes.append((item, _keep_position(sources[type(item)](item))))


def _put_parameters_back(registered: dict[str, Tensor | None], before: dict[str, Tensor | None]) -> None:
    """Fill the dict of a module's parameters with those from before."""
    # FSDP2 moves sharded and unsharded parameters in and out itself.
    if not any(map(is_shard, (*registered.values(), *before.values()))):
        _refill(registered, before)


def _refill(container: Any, content: Any) -> None:
    if type(container) in _DICTS:
        if not _has(container, content):
            container.clear()
            container.update(content)
    else:
        container.clear()
        (container.update if type(container) is set else container.extend)(content)


def _has(container: dict[Any, Any], content: dict[Any, Any]) -> bool:
    """Whether it holds these very objects: then nothing is written, since other code may be in a loop over it."""
    return all(map(is_, container.values(), content.values())) and [*container] == [*content]


def _keep_position(source: tuple[Callable[[], Any], Callable[[Any], object]]) -> Undo:
    read, write = source
    return partial(write, read())


def _keep_what_is_cheap(container: Any) -> Undo | None:
    length = len(container)
    if type(container) in (set, deque):
        return partial(_refill, container, container.copy()) if length <= _MAX_COPIED_ITEMS else None

    def shorten() -> None:
        if type(container) is list:
            del container[length:]
            return
        for name in list(container)[length:]:  # what was added last stands last
            del container[name]

    return shorten


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
