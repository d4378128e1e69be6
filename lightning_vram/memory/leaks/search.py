"""When to count, when to watch a step, and when what it left behind is a leak.

Steady growth starts a watch of one step. Storages of it that are alive ``patience`` steps later, while memory still
grows, are a leak. What keeps a graph is reported at once; anything else if it outlives the epoch and grows in the next
one as well, or if memory would run out before.
"""

import ctypes
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from lightning_vram.memory.device.accelerators import has_statistics
from lightning_vram.memory.leaks.holders import NOBODY, Holder, StepWatch, find_holders
from lightning_vram.memory.units import MIB, format_bytes


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc: ``uordblks`` and ``hblkhd`` are bytes in use, in heaps and in their own maps."""

    _names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = tuple((name, ctypes.c_size_t) for name in _names.split())


class LiveBytes:
    """Counts live bytes of a training's device, and of the host: there whatever else a program has, too."""

    def __init__(self, device: torch.device) -> None:
        self._counters: dict[str, Callable[[], int]] = {}
        if has_statistics(device.type):
            self._counters[str(device)] = partial(torch.get_device_module(device).memory_allocated, device)
        count = _host_counter()
        before, probe = count(), torch.empty(MIB, dtype=torch.uint8, device="cpu")
        if count() - before >= probe.nbytes // 2:  # not of jemalloc or mimalloc
            self._counters["cpu"] = count

    def read(self) -> dict[str, int]:
        """Return bytes by device. Those that nobody counts are left out: the host of macOS and Windows, MPS."""
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
