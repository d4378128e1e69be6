"""CUDA's caching allocator, simulated: which segments it would take from the driver for a stream of allocations.

The rules are those of PyTorch 2.11 to 2.15: ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h``.
The allocators of 2.11 and 2.15, on a driver that was played, had the same bytes after each of 280,000 random
operations, with and without expandable segments, and over recorded training steps (``recorded_steps.json``).
"""

import os
import re
from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning_vram.memory.device.accelerators import VARIABLES
from lightning_vram.memory.units import MIB

MIN_BLOCK = 512
SMALL = MIB  # the largest request that goes to the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
MIN_LARGE = 10 * MIB  # from here on a segment of its own
ROUND_LARGE = 2 * MIB
_NUM_INTERVALS = 16  # of roundup_power2_divisions: sizes from 1 MiB on, doubling
_WITHOUT_EFFECT = (  # on what is reserved; the first collects only in a process that has a memory fraction
    *("garbage_collection_threshold", "per_process_memory_fraction", "throw_on_cudamalloc_oom"),
    *("release_lock_on_cudamalloc", "release_lock_on_hipmalloc", "graph_capture_record_stream_reuse"),
    *("pinned_use_cuda_host_register", "pinned_use_hip_host_register", "pinned_num_register_threads"),
    *("pinned_use_background_threads", "pinned_reserve_segment_size_mb", "pinned_free_catch_all"),
    *("pinned_max_round_threshold_mb", "pinned_max_cached_size_mb"),
)
_PAIR = re.compile(r"([^,:\[\]]+):(\[[^\]]*\]|[^,:\[\]]+)")


@dataclass(frozen=True)
class AllocatorSettings:
    """What decides on blocks and segments."""

    expandable_segments: bool = False  # whether segments grow page by page instead of being made for one size
    max_split_bytes: int | None = None  # blocks of this size and above are not split. ``None`` splits all
    max_non_split_rounding_bytes: int = LARGE_SEGMENT  # by how much a block that is not split may exceed a request
    large_segment_bytes: int = LARGE_SEGMENT  # for requests from 1 to 10 MiB; page of large expandable segments
    # steps between two powers of 2 that sizes are rounded up to, for sizes from 1 MiB, 2 MiB, 4 MiB, ... on; empty
    # and 0 round to 512 bytes
    roundup_power2_divisions: tuple[int, ...] = ()
    ignored: tuple[str, ...] = field(default=(), compare=False)  # given settings without effect on the simulation

    def may_serve(self, block_bytes: int, num_bytes: int) -> bool:
        """Whether a free block may serve a request: one that is not split must be kept for what needs it."""
        limit = self.max_split_bytes
        if limit is None or block_bytes < limit:
            return True
        return num_bytes >= limit and block_bytes < num_bytes + self.max_non_split_rounding_bytes


def read_settings(environment: Mapping[str, str] = os.environ) -> AllocatorSettings:
    """Return the settings that a process with this environment would have."""
    texts = (environment.get(name, "") for name in VARIABLES)
    return parse_settings(next((text for text in texts if text.strip()), ""))


def parse_settings(text: str) -> AllocatorSettings:
    """Read settings as they stand in ``PYTORCH_ALLOC_CONF`` and ``PYTORCH_CUDA_ALLOC_CONF``.

    Example:
        >>> parse_settings("expandable_segments:True").expandable_segments
        True
    """
    values = _split(text)
    name = "large_segment_size_mb"
    large_bytes = _read_mib(name, values.pop(name), MIN_LARGE // MIB + 1) if name in values else LARGE_SEGMENT
    given: dict[str, Any] = {"large_segment_bytes": large_bytes, "max_non_split_rounding_bytes": large_bytes}
    ignored = []
    for name, value in values.items():
        if name in _READERS:
            argument, read = _READERS[name]
            given[argument] = read(name, value, large_bytes // MIB)
        elif name == "backend" and value != "native":
            raise ValueError(f"backend:{value} is another allocator than the one that is simulated, backend:native.")
        elif name in _WITHOUT_EFFECT:
            ignored.append(name)
        elif name != "backend":
            raise ValueError(f"{name!r} is no setting of PyTorch's allocator, in {text!r}.")
    return AllocatorSettings(**given, ignored=tuple(ignored))


def _split(text: str) -> dict[str, str]:
    text = "".join(text.split()).removesuffix(",")
    pairs = _PAIR.findall(text)
    if ",".join(f"{name}:{value}" for name, value in pairs) != text:
        raise ValueError(f"the allocator's settings must be name:value pairs with commas between, got {text!r}.")
    return dict(pairs)


def _read_mib(name: str, value: str, least: int) -> int:
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f"{name} must be a whole number of MiB from {least} on, got {value!r}.")
    return int(value) * MIB


def _read_bool(name: str, value: str, _: int) -> bool:
    if value not in ("True", "False"):
        raise ValueError(f"{name} must be True or False, got {value!r}.")
    return value == "True"


def _read_divisions(name: str, value: str, _: int) -> tuple[int, ...]:
    if not value.startswith("["):
        return (_power_of_2(name, value),) * _NUM_INTERVALS
    divisions = [0] * _NUM_INTERVALS
    last = -1
    for number, pair in enumerate(value[1:-1].split(",")):
        boundary, _colon, steps_text = pair.partition(":")
        steps = 0 if steps_text == "0" else _power_of_2(name, steps_text)
        if boundary == ">":
            divisions[last + 1 :] = [steps] * (_NUM_INTERVALS - last - 1)
            continue
        last = min(_power_of_2(name, boundary).bit_length() - 1, _NUM_INTERVALS - 1)
        if number == 0:
            divisions[:last] = [steps] * last  # smaller sizes as the first that is named
        divisions[last] = steps
    return tuple(divisions)


def _power_of_2(name: str, text: str) -> int:
    number = int(text) if text.isdecimal() else 0
    if number < 1 or number & (number - 1):
        raise ValueError(f"{name} must be made of powers of 2, got {text!r}.")
    return number


_READERS: dict[str, tuple[str, Callable[[str, str, int], Any]]] = {
    "expandable_segments": ("expandable_segments", _read_bool),
    "max_split_size_mb": ("max_split_bytes", _read_mib),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _read_mib),
    "roundup_power2_divisions": ("roundup_power2_divisions", _read_divisions),
}


def round_up(num_bytes: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-num_bytes // multiple) * multiple


def round_request(num_bytes: int, divisions: Sequence[int] = ()) -> int:
    """Return the size of the block that serves a request, with ``divisions`` as in the settings."""
    if num_bytes < MIN_BLOCK:
        return MIN_BLOCK
    if divisions:
        interval = num_bytes.bit_length() - MIB.bit_length()
        steps = divisions[min(max(interval, 0), len(divisions) - 1)]
        if steps > 1 and num_bytes > MIN_BLOCK * steps:
            return round_up(num_bytes, (1 << (num_bytes.bit_length() - 1)) // steps)
    return round_up(num_bytes, MIN_BLOCK)


_ENDLESS = 1 << 50


class DeviceMemory:
    """Memory that the driver has given to this process."""

    def __init__(self) -> None:
        self.reserved_bytes = 0
        self.peak_reserved_bytes = 0
        self._next_address = 1 << 30

    def take(self, num_bytes: int) -> None:
        """Reserve memory. It never runs out: callers compare the peak with what a GPU has."""
        self.reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def make_addresses(self, num_bytes: int) -> int:
        """Return the start of a free range: ranges do not touch."""
        address = self._next_address
        self._next_address += num_bytes + (2 << 20)
        return address


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment; its neighbours are the pieces before and behind it."""

    address: int
    size: int
    pool: "Pool"
    segment_start: int | None = None  # ``None`` in a segment of fixed size
    previous: "Block | None" = None
    next: "Block | None" = None
    is_allocated: bool = False
    is_free: bool = False  # neither: it was freed, and another stream may still use it
    is_mapped: bool = True  # always, but for the empty part of an expandable segment
    requested_bytes: int = 0

    def split(self, size: int) -> "Block":
        """Keep the first ``size`` bytes, and make a block of the rest behind them."""
        rest = Block(self.address + size, self.size - size, self.pool, self.segment_start)
        rest.is_mapped = self.is_mapped
        rest.previous, rest.next = self, self.next
        if rest.next is not None:
            rest.next.previous = rest
        self.next = rest
        self.size = size
        return rest


@dataclass(slots=True, eq=False)
class Pool:
    """Free blocks of one stream, small or large: the smallest first, and of those the lowest address."""

    stream: Hashable
    is_small: bool
    free: list[tuple[int, int, Block]] = field(default_factory=list)
    unmapped: list[tuple[int, Block]] = field(default_factory=list)  # by address

    def put(self, block: Block) -> None:
        """Take a block in, after it has grown by neighbours that are free too."""
        self._coalesce(block)
        block.is_free = True
        if block.is_mapped:
            insort(self.free, (block.size, block.address, block))
        else:
            insort(self.unmapped, (block.address, block))

    def remove(self, block: Block) -> None:
        """Take a block out."""
        block.is_free = False
        if block.is_mapped:
            del self.free[bisect_left(self.free, (block.size, block.address))]
        else:
            del self.unmapped[bisect_left(self.unmapped, (block.address,))]

    def _coalesce(self, block: Block) -> None:
        before = block.previous
        if before is not None and before.is_free and before.is_mapped is block.is_mapped:
            self.remove(before)
            block.address = before.address
            block.size += before.size
            block.previous = before.previous
            if block.previous is not None:
                block.previous.next = block
        behind = block.next
        if behind is not None and behind.is_free and behind.is_mapped is block.is_mapped:
            self.remove(behind)
            block.size += behind.size
            block.next = behind.next
            if block.next is not None:
                block.next.previous = block


@dataclass(eq=False)
class _Segments:
    _device_memory: DeviceMemory
    _settings: AllocatorSettings

    def _take(self, pool: Pool, index: int, size: int) -> Block | None:
        """Take a free block out of the pool, unless it must be kept for what needs it."""
        block = pool.free[index][2]
        if not self._settings.may_serve(block.size, size):
            return None
        del pool.free[index]
        block.is_free = False
        return block


class FixedSegments(_Segments):
    """Makes segments, one ``cudaMalloc`` each, and gives back those that are free as a whole."""

    def find(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block that serves ``size`` out of the pool."""
        index = bisect_left(pool.free, (size,))
        return self._take(pool, index, size) if index < len(pool.free) else None

    def grow(self, pool: Pool, size: int) -> Block:
        """Make a segment for a block of ``size``."""
        if size <= SMALL:
            num_bytes = SMALL_SEGMENT
        else:
            num_bytes = self._settings.large_segment_bytes if size < MIN_LARGE else round_up(size, ROUND_LARGE)
        self._device_memory.take(num_bytes)
        return Block(self._device_memory.make_addresses(num_bytes), num_bytes, pool)

    def release_all(self, pool: Pool) -> None:
        """Give back all segments of which nothing is in use."""
        for _, _, block in list(pool.free):
            if block.previous is None and block.next is None:
                pool.remove(block)
                self._device_memory.reserved_bytes -= block.size


class ExpandableSegments(_Segments):
    """Maps pages into ranges of addresses, one per pool as a rule, and unmaps those of which nothing is in use."""

    def find(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block for ``size`` out of the pool; one that can grow counts with its full size."""
        free = pool.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        while index + 1 < len(free) and _growable_size(free[index + 1][2]) < _growable_size(free[index][2]):
            index += 1
        return self._take(pool, index, size)

    def grow(self, pool: Pool, size: int) -> Block:
        """Map pages at the lowest address where ``size`` bytes fit."""
        block = self._find_addresses(pool, size)
        if not block.is_mapped:
            self._map(block, min(block.size, size))
        while block.size < size:  # it is free, and what is behind it is not mapped
            unmapped = block.next
            assert unmapped is not None
            self._map(unmapped, min(size - block.size, unmapped.size))
            block = unmapped  # has grown by the block before it
        pool.remove(block)
        return block

    def release_all(self, pool: Pool) -> None:
        """Unmap the pages of which nothing is in use, wherever in the segment they are."""
        for _, _, block in list(pool.free):
            unmapped = self._unmap(block)
            if unmapped is not None and unmapped.previous is None and unmapped.next is None:
                pool.remove(unmapped)  # no page of the segment is mapped: its addresses go as well

    def address_space_bytes(self, pool: Pool) -> int:
        """Return how many addresses a segment has: far more than a GPU has memory, so that some may lie idle."""
        return round_up(_ENDLESS, self._page_bytes(pool))

    def _page_bytes(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool.is_small else self._settings.large_segment_bytes

    def _find_addresses(self, pool: Pool, size: int) -> Block:
        for _, unmapped in pool.unmapped:
            before = unmapped.previous
            block = before if before is not None and before.is_free else unmapped
            free_bytes = 0
            behind: Block | None = block
            while free_bytes < size and behind is not None and behind.is_free:
                free_bytes += behind.size
                behind = behind.next
            if free_bytes >= size:
                return block
        size = self.address_space_bytes(pool)
        start = self._device_memory.make_addresses(size)
        segment = Block(start, size, pool, segment_start=start)
        segment.is_mapped = False
        pool.put(segment)
        return segment

    def _map(self, block: Block, size: int) -> None:
        """Map the first ``size`` bytes of a block and what is left of their last page; it stays free."""
        mapped_bytes = round_up(size, self._page_bytes(block.pool))
        self._device_memory.take(mapped_bytes)
        pool = block.pool
        pool.remove(block)
        if mapped_bytes < block.size:
            pool.put(block.split(mapped_bytes))
        block.is_mapped = True
        pool.put(block)

    def _unmap(self, block: Block) -> Block | None:
        """Unmap the whole pages of a free block, and return them as a block; ``None`` if there are none."""
        start, page = block.segment_start or 0, self._page_bytes(block.pool)
        first = start + round_up(block.address - start, page)
        last = start + (block.address + block.size - start) // page * page
        if first >= last:
            return None
        pool = block.pool
        pool.remove(block)
        if first > block.address:
            front, block = block, block.split(first - block.address)
            pool.put(front)
        if last < block.address + block.size:
            pool.put(block.split(last - block.address))
        self._device_memory.reserved_bytes -= last - first
        block.is_mapped = False
        pool.put(block)
        return block


def _growable_size(block: Block) -> int:
    behind = block.next
    return block.size + (behind.size if behind is not None and not behind.is_mapped else 0)


@dataclass(slots=True)
class AllocatorStatistics:
    """Bytes now and at most, as ``torch.cuda.memory_stats`` counts them."""

    requested_bytes: int = 0  # asked for
    allocated_bytes: int = 0  # in blocks that serve requests: ``torch.cuda.memory_allocated``
    peak_requested_bytes: int = 0  # most at once
    peak_allocated_bytes: int = 0  # most at once


class CachingAllocator:
    """Serve requests from cached blocks, and take segments where none fits. Freed blocks are free at once."""

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self.settings = settings or AllocatorSettings()
        self.statistics = AllocatorStatistics()
        self.device_memory = DeviceMemory()
        kind = ExpandableSegments if self.settings.expandable_segments else FixedSegments
        self.segments: ExpandableSegments | FixedSegments = kind(self.device_memory, self.settings)
        self._pools: dict[tuple[Hashable, bool], Pool] = {}
        self._divisions = self.settings.roundup_power2_divisions

    @property
    def reserved_bytes(self) -> int:
        """Taken from the driver: ``torch.cuda.memory_reserved``."""
        return self.device_memory.reserved_bytes

    @property
    def pools(self) -> tuple[Pool, ...]:
        """Where free blocks wait, for each stream two: small and large."""
        return tuple(self._pools.values())

    def malloc(self, num_bytes: int, stream: Hashable = 0) -> Block:
        """Serve a request of ``num_bytes``."""
        if self._divisions or num_bytes < MIN_BLOCK:
            size = round_request(num_bytes, self._divisions)
        else:
            size = (num_bytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK
        is_small = size <= SMALL
        pool = self._pools.get((stream, is_small)) or self.pool_of(stream, is_small=is_small)
        block = self.segments.find(pool, size) or self.segments.grow(pool, size)
        remaining, limit = block.size - size, self.settings.max_split_bytes
        if is_small or self.settings.expandable_segments:
            is_to_split = remaining >= MIN_BLOCK
        else:
            is_to_split = remaining > SMALL and (limit is None or size < limit)
        if is_to_split:
            rest = block.split(size)
            rest.is_free = True
            insort(pool.free, (rest.size, rest.address, rest))  # its neighbours are in use
        self.hand_out(block, num_bytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back."""
        self.request_free(block)
        self.complete_free(block)

    def empty_cache(self) -> None:
        """Give all segments, or pages, back of which nothing is in use."""
        for pool in self._pools.values():
            self.segments.release_all(pool)

    def request_free(self, block: Block) -> None:
        """Do the first half of :meth:`free`: the block cannot be used again yet."""
        if not block.is_allocated:
            raise ValueError(f"free(block) got a block that is not in use, at {block.address:#x}.")
        block.is_allocated = False
        self.statistics.allocated_bytes -= block.size

    def complete_free(self, block: Block) -> None:
        """Do the second half: the block can be used again."""
        self.statistics.requested_bytes -= block.requested_bytes
        block.pool.put(block)

    def pool_of(self, stream: Hashable, *, is_small: bool) -> Pool:
        """Return the pool of a stream, made if it is new."""
        return self._pools.setdefault((stream, is_small), Pool(stream, is_small=is_small))

    def hand_out(self, block: Block, num_bytes: int) -> None:
        """Count a block, taken out of its pool, as one that serves a request."""
        block.is_allocated = True
        block.requested_bytes = num_bytes
        statistics = self.statistics
        statistics.requested_bytes += num_bytes
        statistics.allocated_bytes += block.size
        statistics.peak_requested_bytes = max(statistics.peak_requested_bytes, statistics.requested_bytes)
        statistics.peak_allocated_bytes = max(statistics.peak_allocated_bytes, statistics.allocated_bytes)
