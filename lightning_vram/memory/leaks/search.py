"""When to count, when to watch a step, and when what it left behind is a leak.

Steady growth starts a watch of one step. Storages of it that are alive ``patience`` steps later, while memory still
grows, are a leak. What keeps a graph is reported at once; anything else if it outlives the epoch and grows in the next
one as well, or if memory would run out before.
"""

import ctypes
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from math import sqrt

import torch
from torch import Tensor, nn

from lightning_vram.memory.device.accelerators import has_statistics
from lightning_vram.memory.leaks.holders import Holder, Site, StepWatch, find_holders, keeps_graph
from lightning_vram.memory.units import MIB, format_bytes

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


_NUM_DEVIATIONS = 4.0  # that chance gets to once in 30,000


class Growth:
    """The last ``length`` counts; growth starts at ``min_bytes`` per count."""

    def __init__(self, length: int, min_bytes: int) -> None:
        self._min_bytes = min_bytes
        self._counts: deque[int] = deque(maxlen=length)

    def add(self, count: int) -> None:
        """Note the next count."""
        self._counts.append(count)

    def restart(self) -> None:
        """Forget all counts."""
        self._counts.clear()

    @property
    def is_full(self) -> bool:
        """Whether there are as many counts as decide."""
        return len(self._counts) == self._counts.maxlen

    def steady_bytes(self) -> int:
        """Return by how much each count is larger than the last, if they grow steadily; 0 if not.

        The slope of Theil and Sen, if the trend of Mann and Kendall is beyond chance.
        """
        counts, number = list(self._counts), len(self._counts)
        half = number // 2
        if not self.is_full or min(counts[half:]) <= min(counts[:half]):
            return 0  # the usual case, at once
        pairs = list(combinations(range(number), 2))
        trend = sum((counts[late] > counts[early]) - (counts[late] < counts[early]) for early, late in pairs)
        deviation = sqrt(number * (number - 1) * (2 * number + 5) / 18)
        if trend < min(_NUM_DEVIATIONS * deviation, len(pairs)):
            return 0
        slope = statistics.median((counts[late] - counts[early]) / (late - early) for early, late in pairs)
        return int(slope) if slope >= self._min_bytes else 0

    def goes_on(self) -> bool:
        """Whether the later half is above the earlier by half of the least growth. Ask it if :attr:`is_full`."""
        counts = list(self._counts)
        half = len(counts) // 2
        return min(counts[-half:]) - min(counts[:half]) >= self._min_bytes * half // 2


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


class LeakSearch:
    """Searches for leaks in one kind of step; ``reported`` are paths of holders that any search has reported."""

    def __init__(self, program: Program, patience: int, min_bytes: int, reported: set[str]) -> None:
        self._program = program
        self._patience = patience
        self._min_bytes = min_bytes
        self._growth: dict[str, Growth] = {}
        self._num_steps = 0
        self._next_watch = self._pause = patience
        self._is_armed = False  # the next step is to be watched
        self._watch: StepWatch | None = None
        self._has_watched_step = False  # and not yet looked at what is left
        self._num_tries = 0
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
            self._settle(self._watch)
        elif self._age - _STEPS_TO_SETTLE >= self._patience and all(one.is_full for one in self._growth.values()):
            return self._judge(self._watch, num_steps_left)
        return None

    def end_epoch(self) -> None:
        """Say that what is collected for the end of an epoch, or of a validation, should be gone."""
        self._finish()
        if self._watch is not None and self._watch.is_finished and not self._has_outlived_epoch:
            self._has_outlived_epoch = True
            self._age = _STEPS_TO_SETTLE  # so that a whole window lies behind it
            self._restart()

    def _count(self) -> None:
        for name, num_bytes in self._program.count().items():
            self._growth.setdefault(name, Growth(self._patience, self._min_bytes)).add(num_bytes)

    def _begin(self) -> None:
        self._is_armed = self._has_watched_step = False
        self._watch = StepWatch(self._program.module, follows_operators=self._program.follows_operators)
        self._age, self._has_outlived_epoch, self._found = 0, False, None

    def _finish(self) -> None:
        if self._watch is not None and self._has_watched_step:
            self._watch.finish(self._program.held)
            self._has_watched_step = False

    def _give_up(self) -> None:
        """Wait twice as long as the last time, so that all looks together cost little."""
        self._watch, self._found, self._num_tries = None, None, 0
        self._pause *= 2
        self._next_watch = self._num_steps + self._pause
        self._restart()

    def _settle(self, watch: StepWatch) -> None:
        """Go on with what is left of the step; else watch another one."""
        if self._is_left(watch):
            self._restart()
            return
        self._num_tries += 1
        if self._num_tries < _MAX_TRIES:
            self._watch, self._is_armed = None, True
        else:
            self._give_up()

    def _judge(self, watch: StepWatch, num_steps_left: float) -> Leak | None:
        goes_on = not self._growth or any(growth.goes_on() for growth in self._growth.values())
        if not goes_on or not self._is_left(watch):
            self._give_up()
            return None
        if self._found is None or self._has_outlived_epoch:
            self._found = find_holders(watch, self._program.names())
        left_bytes = _left_bytes(watch)  # what only a cycle kept is gone
        runs_out = (self._slope or left_bytes) * num_steps_left > self._program.room()
        is_sure = left_bytes >= self._min_bytes and (self._has_outlived_epoch or runs_out)
        leak = self._leak(watch, left_bytes, is_sure=is_sure)
        if leak is not None or self._has_outlived_epoch:
            self._give_up()
        else:  # until memory runs out, or the epoch
            self._age = _STEPS_TO_SETTLE
            self._restart()
        return leak

    def _leak(self, watch: StepWatch, left_bytes: int, *, is_sure: bool) -> Leak | None:
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
        return Leak(self._slope or left_bytes, left_bytes, holders, _sites(watch))

    def _is_left(self, watch: StepWatch) -> bool:
        """Whether the watched step has left enough behind: tensors, or the nodes of a graph whose tensors are gone."""
        return _left_bytes(watch) >= self._min_bytes or keeps_graph(watch)

    def _is_growing(self) -> bool:
        if not self._growth:
            return True  # nobody counts: a step is watched now and then
        self._slope = max(growth.steady_bytes() for growth in self._growth.values())
        return self._slope > 0

    def _restart(self) -> None:
        for growth in self._growth.values():
            growth.restart()


def _left_bytes(watch: StepWatch) -> int:
    return sum(size for size, _ in watch.alive().values())


def _sites(watch: StepWatch) -> tuple[tuple[Site, int], ...]:
    sizes: Counter[Site] = Counter()
    for size, site in watch.alive().values():
        if site != Site():
            sizes[site] += size
    return tuple(sizes.most_common(_MAX_SITES))
