"""When to count, when to watch a step, and when what it left behind is a leak.

Steady growth starts a watch of one step. Storages of it that are alive ``patience`` steps later, while memory still
grows, are a leak. What keeps a graph is reported at once; anything else if it outlives the epoch and grows in the next
one as well, or if memory would run out before. If nothing is left of several steps, attributes are measured.
"""

import ctypes
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from math import sqrt

import torch
from torch import Tensor, nn

from lightning_vram.memory.device.accelerators import has_statistics
from lightning_vram.memory.leaks.allocations import AllocationTracker, Site, StepWatch
from lightning_vram.memory.leaks.holders import (
    GrowingAttributes,
    HeldMemory,
    Holder,
    as_holders,
    find_holders,
    keeps_graph,
)
from lightning_vram.memory.units import MIB, format_bytes

_FREE_SECONDS = 1.0  # for tests, and short runs
_SHARE = 0.005  # of the time
_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc: ``uordblks`` and ``hblkhd`` are bytes in use, in heaps and in their own maps."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS.split())


class LiveBytes:
    """Counts live bytes of a training's device, and of the host: there whatever else a program has, too."""

    def __init__(self, device: torch.device) -> None:
        self._counters: dict[str, Callable[[], int]] = {}
        if has_statistics(device.type):
            module = torch.get_device_module(device)
            self._counters[str(device)] = lambda: int(module.memory_allocated(device))
        host = _host_counter()
        if host is not None:
            self._counters["cpu"] = host

    def read(self) -> dict[str, int]:
        """Return bytes by device. Those that nobody counts are left out: the host of macOS and Windows, MPS."""
        return {name: count() for name, count in self._counters.items()}


class Pace:
    """Says in which steps to count, so that counting takes little of the time."""

    def __init__(self) -> None:
        self.stride = 1  # in steps
        self._start = time.perf_counter()
        self._spent = 0.0

    def is_due(self, step: int) -> bool:
        """Whether a step is to be counted."""
        return step % self.stride == 0

    def slow_down(self, seconds: float) -> bool:
        """Note what a count has taken. Returns whether the stride has doubled."""
        now = time.perf_counter()
        self._spent += seconds
        is_slower = self._spent > _FREE_SECONDS + _SHARE * (now - self._start)
        if is_slower:
            self.stride *= 2
            self._spent, self._start = _FREE_SECONDS, now
        return is_slower


def _host_counter() -> Callable[[], int] | None:
    """Return what counts the host's memory; ``None`` where tensors do not come from glibc."""
    read_info = getattr(_c_library(), "mallinfo2", None)
    if read_info is None:
        return None
    read_info.restype = _MallocInfo

    def count() -> int:
        info = read_info()
        return int(info.uordblks + info.hblkhd)

    before = count()
    probe = torch.empty(MIB, dtype=torch.uint8, device="cpu")
    is_counted = count() - before >= probe.nbytes // 2  # not of jemalloc or mimalloc
    return count if is_counted else None


def _c_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None


_STRIDE = 16  # of the coarse series: growth by leaps, or below the noise of single steps
_NUM_DEVIATIONS = 4.0  # that chance gets to once in 30,000


class Growth:
    """``length`` counts at equal moments, and the least of each 16; growth starts at ``min_bytes`` per count."""

    def __init__(self, length: int, min_bytes: int) -> None:
        self._length = length
        self._min_bytes = min_bytes
        self._fine: deque[int] = deque(maxlen=length)
        self._coarse: deque[int] = deque(maxlen=length)
        self._block: list[int] = []

    def add(self, count: int) -> None:
        """Note the next count."""
        self._fine.append(count)
        self._block.append(count)
        if len(self._block) == _STRIDE:
            self._coarse.append(min(self._block))
            self._block.clear()

    def restart(self) -> None:
        """Forget all counts."""
        for counts in (self._fine, self._coarse, self._block):
            counts.clear()

    @property
    def is_full(self) -> bool:
        """Whether there are as many counts as decide."""
        return len(self._fine) == self._length

    def steady_bytes(self) -> int | None:
        """Return by how much each count is larger than the last, if they grow steadily; ``None`` if not."""
        for counts, stride in ((self._fine, 1), (self._coarse, _STRIDE)):
            slope = self._steady_slope(list(counts)) if len(counts) == self._length else None
            if slope is not None and slope >= self._min_bytes * stride:
                return int(slope / stride)
        return None

    def goes_on(self) -> bool:
        """Whether the later half is above the earlier by half of the least growth. Ask it if :attr:`is_full`."""
        half = self._length // 2
        counts = list(self._fine)
        return min(counts[-half:]) - min(counts[:half]) >= self._min_bytes * half // 2

    def _steady_slope(self, counts: Sequence[int]) -> float | None:
        """Return the slope of Theil and Sen, if the trend of Mann and Kendall is beyond chance."""
        half = len(counts) // 2
        if min(counts[half:]) <= min(counts[:half]):
            return None  # the usual case, at once
        number = len(counts)
        pairs = list(combinations(range(number), 2))
        trend = sum((counts[late] > counts[early]) - (counts[late] < counts[early]) for early, late in pairs)
        deviation = sqrt(number * (number - 1) * (2 * number + 5) / 18)
        if trend < min(_NUM_DEVIATIONS * deviation, len(pairs)):
            return None
        return statistics.median((counts[late] - counts[early]) / (late - early) for early, late in pairs)


_STEPS_TO_SETTLE = 2  # gradients and results of a step are freed with the next one, or the one after
_MAX_TRIES = 4  # a step may leave nothing where only each tenth does, say
_MAX_SITES = 3


@dataclass(frozen=True)
class Leak:
    """What grows with the steps."""

    bytes_per_step: int  # by how much memory grows
    tensor_bytes: int  # what the watched step left behind in tensors; the rest is graph, and objects
    holders: tuple[Holder, ...]  # who keeps it
    sites: tuple[tuple[Site, int], ...]  # where it was made, with bytes per step, the largest first

    def __str__(self) -> str:
        """Several lines."""
        lines = [f"{format_bytes(self.bytes_per_step)} per step, {format_bytes(self.tensor_bytes)} of it in tensors."]
        lines += [f"  held by {holder}" for holder in self.holders] or ["  held by no Python object"]
        lines += [f"  allocated in {site}: {format_bytes(size)}" for site, size in self.sites]
        return "\n".join(lines)


@dataclass(frozen=True)
class Program:
    """What a search has to know of the training."""

    count: Callable[[], Mapping[str, int]]  # returns live bytes by device
    module: nn.Module  # whose parts are named
    held: Callable[[], Iterable[Tensor]]  # returns tensors that may stay: parameters, gradients, optimizer states
    names: Callable[[], Mapping[int, str]]  # returns names by ``id`` of what references are followed from
    follows_operators: bool  # whether a dispatch mode may follow a step
    room: Callable[[], float]  # returns free memory in bytes
    attributes: Callable[[], Mapping[str, HeldMemory]] = dict  # returns what each attribute holds, by its path


class LeakSearch:
    """Searches for leaks in one kind of step; ``reported`` are paths of holders that any search has reported."""

    def __init__(self, program: Program, patience: int, min_bytes: int, reported: set[str]) -> None:
        self._program = program
        self._patience = patience
        self._min_bytes = min_bytes
        self._growth: dict[str, Growth] = {}
        self._pace = Pace()
        self._num_steps = 0
        self._next_watch = self._pause = patience
        self._is_armed = False  # the next step is to be watched
        self._watch: StepWatch | None = None
        self._has_watched_step = False  # and not yet looked at what is left
        self._num_tries = 0
        self._attributes: GrowingAttributes | None = None  # since the first try
        self._only_measures = False  # attributes, since nothing was left of the steps
        self._slope = 0  # in bytes per step, when the search began
        self._age = 0  # in steps, of the watched one
        self._has_outlived_epoch = False
        self._found: list[Holder] | None = None
        self._suspects: set[str] = set()  # paths, where nobody counts
        self._reported = reported

    @contextmanager
    def around_step(self) -> Iterator[None]:
        """Has to be around each step: one of many is followed."""
        if self._is_armed:
            self._begin()
        else:
            self._finish()  # what was made between the steps is in it, too
        if self._watch is None:
            yield
            return
        with self._watch.around_step():
            yield

    def end_step(self, num_steps_left: float) -> Leak | None:
        """Count at the end of a step; returns each leak once. ``num_steps_left`` of the epoch: infinity if unknown."""
        self._num_steps += 1
        self._count()
        if self._watch is None:
            self._is_armed = self._num_steps >= self._next_watch and self._is_growing()
            return None
        if not self._watch.is_finished:
            self._has_watched_step = True
            return None
        self._age += 1
        if self._age == _STEPS_TO_SETTLE:
            self._settle(self._watch.births)
            return None
        is_next_epoch = self._has_outlived_epoch and self._age == _STEPS_TO_SETTLE + 1
        if self._only_measures and is_next_epoch and not self._grown_attributes():
            self._give_up()  # the epoch has emptied what was measured
        elif self._age - _STEPS_TO_SETTLE >= self._patience and all(one.is_full for one in self._growth.values()):
            return self._judge(self._watch.births, num_steps_left)
        return None

    def end_epoch(self) -> None:
        """Say that what is collected for the end of an epoch, or of a validation, should be gone."""
        self._finish()
        if self._watch is not None and self._watch.is_finished and not self._has_outlived_epoch:
            self._has_outlived_epoch = True
            self._age = _STEPS_TO_SETTLE  # so that a whole window lies behind it
            self._restart()

    def _count(self) -> None:
        if not self._pace.is_due(self._num_steps):
            return
        start = time.perf_counter()
        for name, num_bytes in self._program.count().items():
            self._growth.setdefault(name, Growth(self._patience, self._min_bytes)).add(num_bytes)
        if self._pace.slow_down(time.perf_counter() - start):
            least = self._min_bytes * self._pace.stride
            self._growth = {name: Growth(self._patience, least) for name in self._growth}

    def _begin(self) -> None:
        self._is_armed = self._has_watched_step = False
        self._watch = StepWatch(self._program.module, follows_operators=self._program.follows_operators)
        self._age, self._has_outlived_epoch, self._found = 0, False, None
        if self._num_tries == 0:
            self._attributes = GrowingAttributes(self._program.attributes, self._min_bytes, self._num_steps)

    def _finish(self) -> None:
        if self._watch is not None and self._has_watched_step:
            self._watch.finish(self._program.held)
            self._has_watched_step = False

    def _give_up(self) -> None:
        """Wait twice as long as the last time, so that all looks together cost little."""
        self._watch, self._found, self._num_tries, self._only_measures = None, None, 0, False
        self._pause *= 2
        self._next_watch = self._num_steps + self._pause
        self._restart()

    def _settle(self, births: AllocationTracker) -> None:
        """Go on with what is left of the step; else watch another one, or follow attributes that have grown."""
        if self._is_left(births):
            self._restart()
            return
        self._num_tries += 1
        if self._num_tries < _MAX_TRIES:
            self._watch, self._is_armed = None, True
        elif self._grown_attributes():
            self._only_measures = True
            self._restart()
        else:
            self._give_up()

    def _judge(self, births: AllocationTracker, num_steps_left: float) -> Leak | None:
        grown = self._grown_attributes() if self._only_measures else {}
        goes_on = not self._growth or any(growth.goes_on() for growth in self._growth.values())
        if not goes_on or not (grown or self._is_left(births)):
            self._give_up()
            return None
        if grown:
            self._found = as_holders(grown)
        elif self._found is None or self._has_outlived_epoch:
            self._found = find_holders(births, self._program.names()) or as_holders(self._grown_attributes())
        # what only a cycle kept is gone
        left_bytes = sum(num_bytes for _, num_bytes in grown.values()) or _left_bytes(births)
        runs_out = (self._slope or left_bytes) * num_steps_left > self._program.room()
        is_sure = left_bytes >= self._min_bytes and (self._has_outlived_epoch or runs_out)
        leak = self._leak(births, left_bytes, is_sure=is_sure)
        if leak is not None or self._has_outlived_epoch:
            self._give_up()
        else:  # until memory runs out, or the epoch
            self._age = _STEPS_TO_SETTLE
            self._restart()
        return leak

    def _leak(self, births: AllocationTracker, left_bytes: int, *, is_sure: bool) -> Leak | None:
        """Return what is to be reported: what keeps a graph, and what else is sure."""
        found = self._found or []
        new = [holder for holder in found if (is_sure or holder.has_graph) and not holder.is_bounded]
        if not self._growth:  # a cache may be full by now: only a second step tells
            new, self._suspects = (
                [holder for holder in new if holder.has_graph or holder.path in self._suspects],
                self._suspects | {holder.path for holder in new},
            )
        holders = tuple(holder for holder in new if holder.path not in self._reported)
        is_of_nobody = is_sure and bool(self._growth) and not found and "" not in self._reported
        if not holders and not is_of_nobody:
            return None
        self._reported |= {holder.path for holder in holders} or {""}
        self._pause *= 4  # it goes on to grow, and leads to looks
        return Leak(self._slope or left_bytes, left_bytes, holders, _sites(births))

    def _grown_attributes(self) -> dict[str, tuple[HeldMemory, int]]:
        return {} if self._attributes is None else self._attributes.look(self._num_steps)

    def _is_left(self, births: AllocationTracker) -> bool:
        """Whether the watched step has left enough behind: tensors, or the nodes of a graph whose tensors are gone."""
        return _left_bytes(births) >= self._min_bytes or keeps_graph(births)

    def _is_growing(self) -> bool:
        if not self._growth:
            return True  # nobody counts: a step is watched now and then
        most = max(growth.steady_bytes() or 0 for growth in self._growth.values())
        self._slope = most // self._pace.stride
        return self._slope > 0

    def _restart(self) -> None:
        for growth in self._growth.values():
            growth.restart()


def _left_bytes(births: AllocationTracker) -> int:
    return sum(size for size, _ in births.alive().values())


def _sites(births: AllocationTracker) -> tuple[tuple[Site, int], ...]:
    sizes: Counter[Site] = Counter()
    for size, site in births.alive().values():
        if site != Site():
            sizes[site] += size
    return tuple(sizes.most_common(_MAX_SITES))
