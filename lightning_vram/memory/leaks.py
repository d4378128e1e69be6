"""Memory that grows with the steps: when to count, when to watch a step, what it left behind, and what keeps that.

Steady growth starts a watch of one step. Storages of it that are alive ``patience`` steps later, while memory still
grows, are a leak. What keeps a graph is reported at once; anything else if it outlives the epoch and grows in the next
one as well, or if memory would run out before.
"""

import ctypes
import gc
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter
from types import FrameType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.memory.device.accelerators import has_cache, read_allocator
from lightning_vram.memory.storages import ByStorage, iterate_storages
from lightning_vram.memory.tracking.operator_listener import StorageSubscriber
from lightning_vram.memory.units import MIB, format_bytes
from lightning_vram.private_names.torch import ends_of_graph, num_nodes, number_of, storage_key


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc: ``uordblks`` and ``hblkhd`` are bytes in use, in heaps and in their own maps."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


class LiveBytes:
    """Counts live bytes of a training's device, and of the host: there whatever else a program has, too."""

    def __init__(self, device: torch.device) -> None:
        self._counters: dict[str, Callable[[], int]] = {}
        if has_cache(device):
            self._counters[str(device)] = lambda: read_allocator(device).allocated_bytes
        count = _host_counter()
        before, probe = count(), torch.empty(MIB, dtype=torch.uint8, device="cpu")
        if count() - before >= probe.nbytes // 2:  # not of jemalloc or mimalloc
            self._counters["cpu"] = count

    def read(self) -> dict[str, int]:
        """Return bytes by device. Those that nobody counts are left out: the host of macOS and Windows."""
        return {name: count() for name, count in self._counters.items()}


def _host_counter() -> Callable[[], int]:
    """Return what counts the bytes that glibc has given away; nothing where there is none."""
    try:
        read_info = ctypes.CDLL(None).mallinfo2
    except (OSError, TypeError, AttributeError):  # Windows, macOS
        return int
    read_info.restype = _MallocInfo
    return lambda: sum(attrgetter("uordblks", "hblkhd")(read_info()))


def steady_bytes(counts: Sequence[int], min_bytes: int) -> int:
    """Return by how much each count is larger than the last, if they grow steadily by ``min_bytes`` or more; else 0.

    Steadily: the least of each quarter is above that of the one before. By chance one window in 24 is: that costs no
    more than a look, and looks become rare.
    """
    starts = [part * len(counts) // 4 for part in range(5)]
    least = [min(counts[start:end]) for start, end in pairwise(starts)]
    slope = (least[3] - least[0]) // starts[3]
    return slope if slope >= min_bytes and all(early < late for early, late in pairwise(least)) else 0


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


_STEPS_TO_SETTLE = 3  # gradients and results of a step are freed with the next one, or the one after
_MAX_SITES = 3


@dataclass(frozen=True)
class Leak:
    """What grows with the steps."""

    bytes_per_step: int  # by how much memory grows
    tensor_bytes: int  # what the watched step left behind in tensors; the rest is graph, and objects
    holders: tuple[Holder, ...]  # who keeps it
    sites: tuple[tuple[str, int], ...]  # lines that made it, with bytes per step, the largest first

    def __str__(self) -> str:
        """Several lines."""
        lines = [f"{format_bytes(self.bytes_per_step)} per step, {format_bytes(self.tensor_bytes)} of it in tensors."]
        lines += [f"  held by {holder}" for holder in self.holders]
        lines += [f"  allocated in {site}: {format_bytes(size)}" for site, size in self.sites]
        return "\n".join(lines)


@dataclass(frozen=True)
class Program:
    """What a search has to know of the training."""

    count: Callable[[], Mapping[str, int]]  # returns live bytes by device
    held: Callable[[], Iterable[Tensor]]  # returns tensors that may stay: parameters, gradients, optimizer states
    names: Callable[[], Mapping[str, object]]  # returns what references are followed from, by name
    follows_operators: bool  # whether a dispatch mode may follow a step
    room: Callable[[], float]  # returns free memory in bytes


class LeakSearch:
    """Searches for leaks in one kind of step; ``reported`` are paths of holders that any search has reported."""

    def __init__(self, program: Program, patience: int, min_bytes: int, reported: set[str]) -> None:
        self._program = program
        self._patience = patience
        self._min_bytes = min_bytes
        self._counts: dict[str, deque[int]] = {}  # the last ``patience`` of each device
        self._num_steps = 0
        self._next_watch = self._pause = patience
        self._is_armed = False  # the next step is to be watched
        self._watch: StepWatch | None = None
        self._age = 0  # of the watched step, in steps that have ended
        self._slope = 0  # in bytes per step
        self._has_looked = self._has_outlived_epoch = False
        self._suspects: set[str] = set()  # paths, where nobody counts
        self._reported = reported

    def around_step(self, *_: Any, **__: Any) -> AbstractContextManager[object]:
        """Return what has to be entered around each step: one of many is followed."""
        if self._is_armed:
            self._watch, self._age = StepWatch(), 0
            self._is_armed = self._has_looked = self._has_outlived_epoch = False
        self._finish()  # what was made between the steps is in it, too
        is_followed = self._watch is not None and not self._watch.is_finished and self._program.follows_operators
        return self._watch if self._watch is not None and is_followed else nullcontext()

    def end_step(self, num_steps_left: float) -> Leak | None:
        """Count at the end of a step; returns each leak once. ``num_steps_left`` of the epoch: infinity if unknown."""
        self._num_steps += 1
        for name, num_bytes in self._program.count().items():
            self._counts.setdefault(name, deque(maxlen=self._patience)).append(num_bytes)
        if self._watch is None:
            self._is_armed = self._num_steps >= self._next_watch and self._is_growing()
            return None
        self._age += 1
        return self._judge(self._watch, num_steps_left) if self._age >= _STEPS_TO_SETTLE + self._patience else None

    def end_epoch(self) -> None:
        """Say that what is collected for the end of an epoch, or of a validation, should be gone."""
        self._finish()
        if self._age and not self._has_outlived_epoch:
            self._has_outlived_epoch = True
            self._age = _STEPS_TO_SETTLE  # so that a whole window lies behind it

    def _finish(self) -> None:
        if self._watch is not None and self._age:
            self._watch.finish(self._program.held)

    def _judge(self, watch: StepWatch, num_steps_left: float) -> Leak | None:
        """Report what is sure; else wait until memory runs out, or the epoch."""
        left_bytes, leak = watch.left_bytes(), None
        is_growing = self._is_growing()
        runs_out = (self._slope or left_bytes) * num_steps_left > self._program.room()
        is_sure = left_bytes >= self._min_bytes and (self._has_outlived_epoch or runs_out)
        if is_growing and (is_sure or not self._has_looked):
            self._has_looked = True
            leak = self._look(watch, is_sure=is_sure)
        self._age = _STEPS_TO_SETTLE
        if leak or self._has_outlived_epoch or not is_growing or watch.left_bytes() < self._min_bytes:
            self._watch, self._age = None, 0
            self._pause *= 2  # so that all looks together cost little
            self._next_watch = self._num_steps + self._pause
        return leak

    def _look(self, watch: StepWatch, *, is_sure: bool) -> Leak | None:
        """Return what is to be reported: what keeps a graph, and what else is sure."""
        found = find_holders(watch, self._program.names())
        left_bytes = watch.left_bytes()  # what only a cycle kept is gone
        is_sure = is_sure and left_bytes >= self._min_bytes
        new = [holder for holder in found or [NOBODY] if (is_sure or holder.has_graph) and not holder.is_bounded]
        if not self._counts:  # a cache may be full by now: only a second step tells
            suspects, self._suspects = self._suspects, self._suspects | {holder.path for holder in new}
            new = [holder for holder in new if holder.has_graph or holder.path in suspects - {NOBODY.path}]
        new = [holder for holder in new if holder.path not in self._reported]
        self._reported |= {holder.path for holder in new}
        sizes: Counter[str] = Counter()
        for size, line in watch.alive().values():
            sizes[line] += size
        del sizes[""]
        sites = tuple(sizes.most_common(_MAX_SITES))
        return Leak(self._slope or left_bytes, left_bytes, tuple(new), sites) if new else None

    def _is_growing(self) -> bool:
        self._slope = max((steady_bytes([*one], self._min_bytes) for one in self._counts.values()), default=0)
        return self._slope > 0 or not self._counts  # where nobody counts, a step is watched now and then
