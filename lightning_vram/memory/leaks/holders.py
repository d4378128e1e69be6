"""Storages that were allocated in a watched step: where, which of them are alive later, and what keeps them."""

import gc
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_vram.memory.storages import ByStorage, iterate_storages
from lightning_vram.memory.tracking.operator_listener import StorageSubscriber
from lightning_vram.memory.tracking.tracker import Ledger, follow_modules
from lightning_vram.private_names.torch import ends_of_graph, num_nodes, number_of, storage_key

_LIBRARIES = sys.stdlib_module_names | {
    *("torch", "torchmetrics", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_vram")
}


@dataclass(frozen=True)
class Site:
    """Where a storage was made."""

    module: str = ""  # name of the innermost module whose forward ran; empty for the root and outside of any
    line: str = ""  # innermost line of the user's, ``"model.py:42 in training_step"``; empty in the backward

    def __str__(self) -> str:
        """``net.0, model.py:42 in training_step``."""
        return ", ".join(filter(None, [self.module, self.line])) or "place unknown"


def storages_of(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Yield the storages behind tensors that take memory: not those of fake tensors, which compilers keep."""
    for tensor in tensors:
        try:
            found = [storage for storage, _ in iterate_storages(tensor) if storage.device.type != "meta"]
        except (AttributeError, RuntimeError, NotImplementedError):  # half made, or of a transform
            continue
        yield from found


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield a frame and those that called it, those of libraries left out."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES:
            yield frame
        frame = frame.f_back


class StepWatch(StorageSubscriber):
    """Storages made from before one step to before the next: :meth:`finish` ends it. Followed steps run uncompiled."""

    takes_apart = True
    known: ByStorage[Site]

    def __init__(self, module: nn.Module, *, follows_operators: bool) -> None:
        super().__init__(ByStorage())
        self.nodes = range(0)  # of the graph of the step, by number
        self.is_finished = False
        self._module = module
        self._follows_operators = follows_operators
        self._old_keys = {storage_key(storage) for storage in storages_of(live_tensors())}
        self._first_node = num_nodes()
        self._place = Ledger()  # of which only the name of the module is used
        self._outer: set[FrameType] = set()  # frames that were there before the step, and made nothing of it

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Follow the operators of the step inside the block, if they may be."""
        if not self._follows_operators or self.is_finished:
            yield
            return
        self._outer.update(_frames(sys._getframe(1)))
        with ExitStack() as stack:
            stack.callback(self._outer.clear)
            stack.callback(self._place.close)
            follow_modules(stack, self._place, self._module, lambda: None)
            stack.enter_context(self)
            yield

    @override
    def on_storage(self, func: Any, storage: torch.UntypedStorage, device: torch.device) -> None:
        if storage.device.type != "meta":
            self.known.note_storage(storage, Site(self._place.module, self._line_of_user()))

    def _line_of_user(self) -> str:
        """Return the innermost line of the user's code that runs now; empty if it is none inside of the step."""
        for frame in _frames(sys._getframe(1)):
            if frame in self._outer:
                return ""
            if not frame.f_code.co_filename.startswith("<"):
                return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
        return ""

    def finish(self, held: Callable[[], Iterable[Tensor]]) -> None:
        """End with the step; ``held`` returns what may be new and stay: parameters, gradients, optimizer states."""
        self.nodes = range(self._first_node, num_nodes())
        for storage in storages_of(live_tensors()):
            if storage_key(storage) not in self._old_keys and self.known.find_storage(storage) is None:
                self.known.note_storage(storage, Site())
        for storage in storages_of(held()):
            self.known.drop_storage(storage)
        self._old_keys.clear()
        self.is_finished = True

    def alive(self) -> dict[int, tuple[int, Site]]:
        """Return bytes and site of the storages that are alive, by their key."""
        return {storage_key(storage): (int(storage.nbytes()), site) for storage, site in self.known.items()}


def live_tensors() -> list[Tensor]:
    """Return the tensors that Python can see."""
    kinds = {Tensor}
    waiting = [Tensor]
    while waiting:
        new = set(waiting.pop().__subclasses__()) - kinds
        kinds |= new
        waiting += new
    return [thing for thing in gc.get_objects() if type(thing) in kinds]


_MAX_DEPTH = 14
_MAX_WIDTH = 20_000  # objects per level: beyond, chance paths through large tables
_MODULE_TABLES = ("_modules", "_parameters", "_buffers")  # in which nn.Module keeps attributes


def is_a(thing: object, kinds: Any) -> Any:
    """Like ``isinstance``, which asks proxies and mocks for their class; some of them warn, or load a library."""
    return issubclass(type(thing), kinds)


@dataclass(slots=True)
class Link:
    """An object on the way, and what it refers to."""

    thing: Any
    below: "Link | None"
    covers: frozenset[int]  # targets that it leads to, by id: also those that share a container with the last link


def find_chains(targets: Iterable[object], names: Mapping[int, str], ignored: Iterable[object] = ()) -> list[Link]:
    """Find the shortest chain of references to each target from a global, a class or one of ``names`` (by ``id``).

    Returns the first links. A running function's variable begins a chain only if nothing better does.
    """
    level = [Link(target, None, frozenset({id(target)})) for target in targets]
    seen = {id(link.thing) for link in level} | {id(thing) for thing in ignored}
    found: list[Link] = []
    frames: list[Link] = []
    done: set[int] = set()
    for _ in range(_MAX_DEPTH):
        if not level or len(level) > _MAX_WIDTH:
            break
        level, named, running = _climb(level, seen, names)
        for link in named:
            if not link.covers <= done:
                found.append(link)
            done |= link.covers
        frames += running
        level = [link for link in level if not link.covers <= done]
    return found + [link for link in frames if not link.covers <= done]


def _climb(level: list[Link], seen: set[int], names: Mapping[int, str]) -> tuple[list[Link], list[Link], list[Link]]:
    """Return who refers to a level: those without a name, those with one, and frames."""
    below = {id(link.thing): link for link in level}
    things = [link.thing for link in level]
    above: list[Link] = []
    named: list[Link] = []
    running: list[Link] = []
    ours = {id(below), id(things), id(level), id(above), id(named), id(running)}
    for thing in gc.get_referrers(*things):
        if id(thing) in ours or id(thing) in seen or is_a(thing, Link):
            continue
        children = [below[id(part)] for part in gc.get_referents(thing) if id(part) in below]
        if not children or _is_of_this_package(thing):
            continue
        seen.add(id(thing))
        link = Link(thing, children[0], frozenset().union(*(child.covers for child in children)))
        if is_a(thing, types.FrameType):
            running.append(link)
        elif id(thing) in names or _own_name(thing) is not None:
            named.append(link)
        else:
            above.append(link)
    return above, named, running


def _is_of_this_package(thing: Any) -> bool:
    if is_a(thing, types.FrameType | types.GeneratorType):
        frame = thing if is_a(thing, types.FrameType) else thing.gi_frame
        return frame is not None and str(frame.f_globals.get("__name__")).startswith("lightning_vram.memory.leaks")
    return False


def _own_name(thing: Any) -> str | None:
    if type(thing) is dict and "__builtins__" in thing and "__name__" in thing:  # globals
        return str(thing["__name__"])
    if is_a(thing, types.ModuleType):
        return str(thing.__name__)
    return str(thing.__qualname__) if is_a(thing, type) else None


def describe_chain(chain: Link, names: Mapping[int, str], until: object = None) -> str:
    """Write a chain as one would in code, up to ``until``: ``self.net.cache['x']``."""
    thing = chain.thing
    text = names.get(id(thing)) or _own_name(thing) or type(thing).__name__
    if is_a(thing, types.FrameType) and not names.get(id(thing)):
        text = f"{thing.f_code.co_name}() ({thing.f_code.co_filename}:{thing.f_lineno})"
    link: Link | None = chain
    while link is not None and link.below is not None and link.thing is not until:
        text, link = _step(text, link)
    return text


def _step(text: str, link: Link) -> tuple[str, Link | None]:
    """Return the text with the next reference, and the link that it leads to."""
    thing, below = link.thing, link.below
    assert below is not None
    child = below.thing
    if is_a(thing, types.FrameType):
        return f"{_key_of(thing.f_locals, child)}, a variable of {text}", below
    if is_a(thing, dict) and _own_name(thing) is not None:
        return f"{text}.{_key_of(thing, child)}", below
    if is_a(thing, types.FunctionType):
        return _step_of_function(text, thing, below)
    if is_a(thing, Mapping):
        key = _key_of(thing, child)
        for table in _MODULE_TABLES:
            if text.endswith(f".{table}"):
                return f"{text.removesuffix(table)}{key}", below
        return f"{text}[{key!r}]", below
    return _step_of_object(text, thing, below)


def _step_of_object(text: str, thing: Any, below: Link) -> tuple[str, Link | None]:
    child = below.thing
    if is_a(thing, types.CellType):
        return text, below
    if is_a(thing, list | tuple):
        return f"{text}[{next(index for index, item in enumerate(thing) if item is child)}]", below
    attributes = getattr(thing, "__dict__", {})
    if is_a(child, dict) and below.below is not None and (child is attributes or is_a(thing, type)):
        return f"{text}.{_key_of(attributes, below.below.thing)}", below.below
    name = _key_of(attributes, child)
    if name is not None:
        return f"{text}.{name}", below
    return f"{text}[...]" if hasattr(type(thing), "__len__") else f"{text}.<{type(thing).__name__}>", below


def _step_of_function(text: str, function: types.FunctionType, below: Link) -> tuple[str, Link | None]:
    """Name the variable of a closure, which is behind a tuple of cells."""
    code = function.__code__
    owner = f"{function.__qualname__}() ({code.co_filename}:{code.co_firstlineno})"
    place = f" at {text}" if text else ""
    cell = below.below if below.thing is function.__closure__ else None
    cells = function.__closure__ or ()
    if cell is not None and any(cell.thing is other for other in cells):
        name = next(name for name, other in zip(code.co_freevars, cells, strict=True) if other is cell.thing)
        return f"{name}, in the closure of {owner}{place}", cell
    return f"{owner}{place}", below


def is_table_of_attributes(thing: object, owners: Iterable[object]) -> bool:
    """Whether a dict holds attributes or globals, for one of ``owners`` that refer to it."""
    if not is_a(thing, dict):
        return False
    for owner in owners:
        attributes = getattr(owner, "__dict__", {})
        tables = (attributes, *(attributes.get(table) for table in _MODULE_TABLES))
        if is_a(owner, type) or any(table is thing for table in tables):
            return True
    return _own_name(thing) is not None


def _key_of(mapping: Mapping[Any, Any], child: object) -> Any:
    return next((key for key, value in list(mapping.items()) if value is child), None)


_MAX_TARGETS = 16
_LEAST_PART = 100  # of the largest: sums that Lightning logs are new in each epoch, too
_MAX_NODES = 200_000
_METRIC = "torchmetrics.metric", "Metric"


@dataclass(frozen=True)
class Holder:
    """What keeps storages alive."""

    path: str  # as one would write it in code: ``self.losses``
    container: str  # class of the container whose items they are; empty if it is one tensor
    num_items: int  # of the container
    num_graphs: int  # how many of the items have the graph that made them
    has_graph: bool  # whether the graph of the step is kept, which seldom is meant
    is_metric: bool  # whether it is the state of a metric, which goes with the metric's ``reset``
    is_bounded: bool  # whether it is in a deque with a length, which is no leak however long it fills

    def __str__(self) -> str:
        """One sentence, and what to do."""
        if self.is_metric:
            what = f"list state of a metric, {self.num_items} items" if self.container else "state of a metric"
            if self.has_graph:
                return f"{self.path}: {what}, with autograd graph. Call metric.update(preds.detach(), ...) instead."
            return f"{self.path}: {what}. reset() was not called. MetricOffload() moves such lists to the host."
        if not self.has_graph:
            what = f"a {self.container} of {self.num_items} items" if self.container else "a tensor for each step"
            return f"{self.path}: {what}. Clear it, limit its length, or move its tensors to the host."
        if not self.container:
            return f"{self.path}: a tensor whose autograd graph spans all steps. Add value.detach() to it instead."
        graphs = f"{self.num_graphs} with their autograd graph" if self.num_graphs else "with autograd graph"
        return f"{self.path}: a {self.container} of {self.num_items} items, {graphs}. Store value.detach() instead."


def find_holders(watch: StepWatch, names: Mapping[int, str]) -> list[Holder]:
    """Name what keeps the storages that are left of a step, unless only C++ sees it. Takes some tenths of a second."""
    gc.collect()  # what only a cycle keeps is kept by nobody
    targets, with_graph = _targets(watch)
    found: dict[str, Holder] = {}
    for chain in find_chains(targets, names, ignored=[targets]):
        holder = _describe(chain, names, has_graph=not chain.covers.isdisjoint(with_graph))
        found.setdefault(holder.path, holder)
    return list(found.values())


def keeps_graph(watch: StepWatch) -> bool:
    """Whether a tensor that Python can see has nodes of the graph of the step: also where their tensors are gone."""
    return any(_reaches(tensor, watch.nodes) for tensor in live_tensors())


def _targets(watch: StepWatch) -> tuple[list[Tensor], set[int]]:
    """Return the tensors that keep most, and the ``id`` of those that keep the graph of the step."""
    alive = watch.alive()
    sizes: dict[int, int] = {}
    with_graph: set[int] = set()
    tensors = live_tensors()
    for tensor in tensors:
        size = sum(alive.get(storage_key(storage), (0,))[0] for storage in storages_of([tensor]))
        if _reaches(tensor, watch.nodes):
            with_graph.add(id(tensor))
        if size or id(tensor) in with_graph:
            sizes[id(tensor)] = size
    least = max(sizes.values(), default=0) // _LEAST_PART
    found = [tensor for tensor in tensors if sizes.get(id(tensor), -1) >= least or id(tensor) in with_graph]
    found.sort(key=lambda tensor: (id(tensor) not in with_graph, -sizes[id(tensor)]))
    return found[:_MAX_TARGETS], with_graph


def _reaches(tensor: Tensor, nodes: range) -> bool:
    """Whether the graph of ``tensor`` has one of ``nodes``: numbers fall along the way from a result."""
    stack = ends_of_graph(tensor)
    seen: set[Any] = set()
    while stack and len(seen) < _MAX_NODES:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        number = number_of(node)
        if number in nodes:
            return True
        if number >= nodes.stop:
            stack += [earlier for earlier, _ in node.next_functions]
    return False


def _describe(chain: Link, names: Mapping[int, str], *, has_graph: bool) -> Holder:
    things, link = [chain.thing], chain.below
    while link is not None:
        things.append(link.thing)
        link = link.below
    containers = (one for one in _inner(things[:-1]) if is_a(one, dict | list | tuple | set | deque) and len(one) > 1)
    container = max(containers, key=len, default=None)
    items: list[Any] = list(container.values() if isinstance(container, Mapping) else container or ())
    graphs = [item for item in items if any(ends_of_graph(tensor) for tensor in _tensors(item))]
    kinds = (kind for thing in things for kind in type(thing).__mro__)
    return Holder(
        path=describe_chain(chain, names, until=container),
        container="" if container is None else type(container).__name__,
        num_items=len(items),
        num_graphs=len(graphs),
        has_graph=has_graph,
        is_metric=any((kind.__module__, kind.__name__) == _METRIC for kind in kinds),
        is_bounded=any(is_a(thing, deque) and thing.maxlen is not None for thing in things),
    )


def _inner(things: list[Any]) -> Iterator[Any]:
    """Yield what lies between the name and the tensor, but for tables of attributes and cells of closures."""
    for place, thing in enumerate(things):
        owners = things[max(0, place - 2) : place]
        is_of_function = is_a(thing, tuple) and any(map(callable, owners[-1:]))
        if not is_of_function and not is_table_of_attributes(thing, owners):
            yield thing


def _tensors(item: Any) -> Iterator[Tensor]:
    if is_a(item, Tensor):
        yield item
    else:
        yield from (part for part in gc.get_referents(item) if is_a(part, Tensor))
