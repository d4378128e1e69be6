"""Storages that were allocated in a watched step: where, which of them are alive later, and what keeps them."""

import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.memory.storages import ByStorage, iterate_storages
from lightning_vram.memory.tracking.operator_listener import StorageSubscriber
from lightning_vram.private_names.torch import ends_of_graph, num_nodes, number_of, storage_key

_LIBRARIES = sys.stdlib_module_names | {
    *("torch", "torchmetrics", "lightning", "lightning_fabric", "pytorch_lightning", "lightning_vram")
}


def storages_of(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    """Yield the storages behind tensors that take memory: not those of fake tensors, which compilers keep."""
    for tensor in tensors:
        try:
            found = [storage for storage, _ in iterate_storages(tensor) if storage.device.type != "meta"]
        except (AttributeError, RuntimeError, NotImplementedError):  # half made, or of a transform
            continue
        yield from found


def _frames_of_user() -> list[FrameType]:
    """Return the running frames, the innermost first, without those of libraries."""
    found: list[FrameType] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] not in _LIBRARIES:
            found.append(frame)
        frame = frame.f_back
    return found


class StepWatch(StorageSubscriber):
    """Storages made from before one step to before the next, with the line that made them: :meth:`finish` ends it.

    The line is the innermost one of the user's; empty in the backward. While it is entered, nothing runs compiled.
    """

    takes_apart = True
    known: ByStorage[str]

    def __init__(self) -> None:
        super().__init__(ByStorage())
        self.nodes = range(0)  # of the graph of the step, by number
        self.is_finished = False
        self._old_keys = {storage_key(storage) for storage in storages_of(live_tensors())}
        self._first_node = num_nodes()
        self._num_outer = len(_frames_of_user())  # that were there before the step, and made nothing of it

    @override
    def on_storage(self, func: Any, storage: torch.UntypedStorage, device: torch.device) -> None:
        if storage.device.type != "meta":
            frames = _frames_of_user()
            inner = frames[: max(0, len(frames) - self._num_outer)]
            codes = ((frame, frame.f_code) for frame in inner if not frame.f_code.co_filename.startswith("<"))
            lines = (f"{code.co_filename}:{frame.f_lineno} in {code.co_name}" for frame, code in codes)
            self.known.note_storage(storage, next(lines, ""))

    def finish(self, held: Callable[[], Iterable[Tensor]]) -> None:
        """End with the step; ``held`` returns what may be new and stay: parameters, gradients, optimizer states."""
        if self.is_finished:
            return
        self.nodes = range(self._first_node, num_nodes())
        for storage in storages_of(live_tensors()):
            if storage_key(storage) not in self._old_keys and self.known.find_storage(storage) is None:
                self.known.note_storage(storage, "")
        for storage in storages_of(held()):
            self.known.drop_storage(storage)
        self._old_keys.clear()
        self.is_finished = True

    def alive(self) -> dict[int, tuple[int, str]]:
        """Return bytes and line of the storages that are alive, by their key."""
        return {storage_key(storage): (int(storage.nbytes()), line) for storage, line in self.known.items()}

    def left_bytes(self) -> int:
        """Return the bytes that are alive."""
        return sum(size for size, _ in self.alive().values())


def live_tensors() -> list[Tensor]:
    """Return the tensors that Python can see."""
    return [thing for thing in gc.get_objects() if is_a(thing, Tensor)]


def is_a(thing: object, kinds: Any) -> Any:
    """Like ``isinstance``, which asks proxies and mocks for their class; some of them warn, or load a library."""
    return issubclass(type(thing), kinds)


_MAX_TARGETS = 16
_LEAST_PART = 100  # of the largest: sums that Lightning logs are new in each epoch, too
_MAX_NODES = 200_000
_MAX_OBJECTS = 1_000_000  # that a search looks at
_METRIC = "torchmetrics.metric", "Metric"
_MODULE_TABLES = ("_modules", "_parameters", "_buffers")  # in which nn.Module keeps attributes


@dataclass(frozen=True)
class Holder:
    """What keeps storages alive."""

    path: str  # as one would write it in code: ``self.losses``; empty if no Python object was found
    text: str  # one sentence, and what to do
    has_graph: bool  # whether the graph of the step is kept, which seldom is meant
    is_bounded: bool  # whether it is in a deque with a length, which is no leak however long it fills

    def __str__(self) -> str:
        """``self.losses: a list of 23 items. Clear it.``."""
        return f"{self.path}: {self.text}" if self.path else self.text


NOBODY = Holder("", "no Python object", has_graph=False, is_bounded=False)


def find_holders(watch: StepWatch, names: Mapping[str, object]) -> list[Holder]:
    """Name what keeps the storages that are left of a step, unless only C++ sees it. Takes about a second.

    References are followed from the objects of ``names``, by what they are called, and then from all globals.
    """
    gc.collect()  # what only a cycle keeps is kept by nobody
    targets = _targets(watch)
    found: dict[str, Holder] = {}
    for link in _ways(set(targets), names):
        holder = _describe(link, has_graph=targets[id(link.thing)])
        if holder.path not in found or holder.has_graph:
            found[holder.path] = holder
    return list(found.values())


def _targets(watch: StepWatch) -> dict[int, bool]:
    """Return the tensors that keep most, by their ``id``, and whether they keep the graph of the step."""
    alive = watch.alive()
    kept: list[tuple[bool, int, int]] = []
    for tensor in live_tensors():
        size = sum(alive.get(storage_key(storage), (0,))[0] for storage in storages_of([tensor]))
        has_graph = _reaches(tensor, watch.nodes)
        if size or has_graph:
            kept.append((has_graph, size, id(tensor)))
    least = max((size for _, size, _ in kept), default=0) // _LEAST_PART
    kept = sorted((one for one in kept if one[0] or one[1] >= least), reverse=True)[:_MAX_TARGETS]
    return {key: has_graph for has_graph, _, key in kept}


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


@dataclass(slots=True)
class _Link:
    path: str
    thing: Any
    above: "_Link | None"  # refers to it


def _ways(targets: set[int], names: Mapping[str, object]) -> Iterator[_Link]:
    """Yield the shortest way to each target, by its ``id``."""
    seen: set[int] = set()
    for roots in (names, dict(sys.modules)):
        queue = deque(_Link(path, thing, None) for path, thing in roots.items() if id(thing) not in seen)
        seen |= {id(link.thing) for link in queue}
        while queue and targets and len(seen) < _MAX_OBJECTS:
            link = queue.popleft()
            if id(link.thing) in targets:
                targets.discard(id(link.thing))
                yield link
            for path, part in _parts(link.path, link.thing):
                if id(part) not in seen and gc.is_tracked(part) and not is_a(part, ModuleType):
                    seen.add(id(part))
                    queue.append(_Link(path, part, link))


def _parts(path: str, thing: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object refers to, as one would write it in code; what has no name there is called as the object."""
    if is_a(thing, dict):
        for key, value in list(dict.items(thing)):
            yield f"{path}[{key!r}]" if type(key) in (str, int) else f"{path}[...]", value
    elif is_a(thing, list | tuple | deque):
        yield from ((f"{path}[{index}]", value) for index, value in enumerate(tuple(thing)))
    elif is_a(thing, type):
        yield from ((path, base) for base in thing.__mro__)
    elif is_a(thing, FunctionType):  # whose globals have names of their own
        code, cells = thing.__code__, thing.__closure__ or ()
        place = f"in the closure of {thing.__qualname__}() ({code.co_filename}:{code.co_firstlineno}) at {path}"
        yield from ((f"{name}, {place}", cell) for name, cell in zip(code.co_freevars, cells, strict=True))
        yield f"{path}.__defaults__", thing.__defaults__
    with suppress(AttributeError):
        for name, part in _attributes(object.__getattribute__(thing, "__dict__")):  # as proxies do not have it
            yield f"{path}.{name}", part
    if not is_a(thing, FunctionType):
        yield from ((path, part) for part in gc.get_referents(thing))


def _attributes(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in list(attributes.items()):
        yield from list(value.items()) if name in _MODULE_TABLES and is_a(value, dict) else [(name, value)]


def _describe(link: _Link, *, has_graph: bool) -> Holder:
    links = [link]
    while links[-1].above is not None:
        links.append(links[-1].above)
    things = [one.thing for one in links]
    containers = [one for one in links[1:] if is_a(one.thing, dict | list | tuple | set | deque) and len(one.thing) > 1]
    container = max(containers, key=lambda one: len(one.thing), default=None)
    kinds = {(kind.__module__, kind.__name__) for thing in things for kind in type(thing).__mro__}
    return Holder(
        path=(container or link).path,
        text=_say(None if container is None else container.thing, is_metric=_METRIC in kinds, has_graph=has_graph),
        has_graph=has_graph,
        is_bounded=any(is_a(thing, deque) and thing.maxlen is not None for thing in things),
    )


def _say(container: Any, *, is_metric: bool, has_graph: bool) -> str:
    items = list(container.values() if is_a(container, dict) else container or ())
    size = f"{len(items)} items" if items else ""
    if is_metric:
        what = f"list state of a metric, {size}" if items else "state of a metric"
        if has_graph:
            return f"{what}, with autograd graph. Call metric.update(preds.detach(), ...) instead."
        return f"{what}. reset() was not called. MetricOffload() moves such lists to the host."
    if not has_graph:
        what = f"a {type(container).__name__} of {size}" if items else "a tensor for each step"
        return f"{what}. Clear it, limit its length, or move its tensors to the host."
    if not items:
        return "a tensor whose autograd graph spans all steps. Add value.detach() to it instead."
    num_graphs = sum(any(ends_of_graph(one) for one in _tensors(item)) for item in items)
    graphs = f"{num_graphs} with their autograd graph" if num_graphs else "with autograd graph"
    return f"a {type(container).__name__} of {size}, {graphs}. Store value.detach() instead."


def _tensors(item: Any) -> list[Tensor]:
    return [part for part in (item, *gc.get_referents(item)) if is_a(part, Tensor)]
