"""CUDA's caching allocator, simulated: which segments it would take from the driver for the allocations of a step.

The rules are those of PyTorch 2.11 to 2.15: ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h``.
The allocators of 2.11 and 2.15, on a driver that was played, had the same bytes after each of 280,000 random
operations, with and without expandable segments, and over recorded training steps (``recorded_steps.json``).
"""

import os
import re
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace

from lightning_vram.memory.device.accelerators import VARIABLES
from lightning_vram.memory.estimate.workspaces import Workspaces
from lightning_vram.memory.tracking.timeline import Allocation, MemoryEvent, MemoryTimeline, Phase
from lightning_vram.memory.units import MIB

MIN_BLOCK = 512
SMALL = MIB  # the largest request that goes to the small pool
SMALL_SEGMENT = 2 * MIB
LARGE_SEGMENT = 20 * MIB
MIN_LARGE = 10 * MIB  # from here on a segment of its own
ROUND_LARGE = 2 * MIB
_PAIR = re.compile(r"([^,:\[\]]+):(\[[^\]]*\]|[^,:\[\]]+)")


@dataclass(frozen=True)
class AllocatorSettings:
    """What decides on blocks and segments."""

    expandable_segments: bool = False  # whether segments grow page by page instead of being made for one size
    max_split_bytes: int | None = None  # blocks of this size and above are not split. ``None`` splits all
    max_non_split_rounding_bytes: int = LARGE_SEGMENT  # by how much a block that is not split may exceed a request
    large_segment_bytes: int = LARGE_SEGMENT  # for requests from 1 to 10 MiB; page of large expandable segments
    roundup_power2_divisions: int = 0  # steps between two powers of 2 that sizes are rounded up to; 0: 512 bytes


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
    text = "".join(text.split()).removesuffix(",")
    pairs = _PAIR.findall(text)
    if ",".join(f"{name}:{value}" for name, value in pairs) != text:
        raise ValueError(f"the allocator's settings must be name:value pairs with commas between, got {text!r}.")
    given = dict(pairs)
    if given.get("backend", "native") != "native":
        raise ValueError(f"backend:{given['backend']} is another allocator than the simulated one, backend:native.")
    large_bytes = _read_mib(given, "large_segment_size_mb", MIN_LARGE // MIB + 1) or LARGE_SEGMENT
    least = large_bytes // MIB
    return AllocatorSettings(  # other settings do not change what is reserved; PyTorch refuses unknown ones
        expandable_segments=given.get("expandable_segments") == "True",
        max_split_bytes=_read_mib(given, "max_split_size_mb", least),
        max_non_split_rounding_bytes=_read_mib(given, "max_non_split_rounding_mb", least) or large_bytes,
        large_segment_bytes=large_bytes,
        roundup_power2_divisions=_read_divisions(given.get("roundup_power2_divisions", "0")),
    )


def _read_mib(given: Mapping[str, str], name: str, least: int) -> int | None:
    value = given.get(name, f"{least}")
    if not value.isdecimal() or int(value) < least:
        raise ValueError(f"{name} must be a whole number of MiB from {least} on, got {value!r}.")
    return int(value) * MIB if name in given else None


def _read_divisions(value: str) -> int:
    number = int(value) if value.isdecimal() else -1
    if number < 0 or number & (number - 1):
        raise ValueError(
            f"roundup_power2_divisions must be one power of 2, for all sizes, in an estimate, got {value!r}."
        )
    return number


def round_up(num_bytes: int, multiple: int) -> int:
    """Return the next multiple."""
    return -(-num_bytes // multiple) * multiple


def round_request(num_bytes: int, divisions: int = 0) -> int:
    """Return the size of the block that serves a request, with ``divisions`` as in the settings."""
    if divisions > 1 and num_bytes > MIN_BLOCK * divisions:
        return round_up(num_bytes, (1 << (num_bytes.bit_length() - 1)) // divisions)
    return max(MIN_BLOCK, (num_bytes + MIN_BLOCK - 1) // MIN_BLOCK * MIN_BLOCK)


_ADDRESSES = 1 << 50  # of an expandable segment: far more than a GPU has memory


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment; its neighbours are the pieces before and behind it."""

    address: int
    size: int
    pool: "Pool"
    previous: "Block | None" = None
    next: "Block | None" = None
    is_free: bool = False
    requested_bytes: int = 0

    def split(self, size: int) -> "Block":
        """Keep the first ``size`` bytes, and make a block of the rest behind them."""
        rest = Block(self.address + size, self.size - size, self.pool, self, self.next)
        if rest.next is None:
            self.pool.last = rest
        else:
            rest.next.previous = rest
        self.next = rest
        self.size = size
        return rest


@dataclass(slots=True, eq=False)
class Pool:
    """Free blocks of one stream, small or large: the smallest first, and of those the lowest address."""

    free: list[tuple[int, int, Block]] = field(default_factory=list)
    last: Block | None = None  # of the newest segment: an expandable one, of which a pool has one, grows behind it

    def put(self, block: Block) -> None:
        """Take a block in, after it has grown by neighbours that are free too."""
        before = block.previous
        if before is not None and before.is_free:
            self.remove(before)
            block.address = before.address
            block.size += before.size
            block.previous = before.previous
            if block.previous is not None:
                block.previous.next = block
        behind = block.next
        if behind is not None and behind.is_free:
            self.remove(behind)
            block.size += behind.size
            block.next = behind.next
            if block.next is not None:
                block.next.previous = block
            elif self.last is behind:
                self.last = block
        block.is_free = True
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        """Take a block out."""
        block.is_free = False
        del self.free[bisect_left(self.free, (block.size, block.address))]


class CachingAllocator:
    """Serve requests from cached blocks, and take segments where none fits. Freed blocks are free at once."""

    def __init__(self, settings: AllocatorSettings | None = None) -> None:
        self.settings = settings or AllocatorSettings()
        self.allocated_bytes = 0  # in blocks that serve requests: ``torch.cuda.memory_allocated``
        self.reserved_bytes = 0  # taken from the driver, which never runs out: ``torch.cuda.memory_reserved``
        self._pools: defaultdict[tuple[Hashable, bool], Pool] = defaultdict(Pool)  # by stream, and whether for small
        self._next_address = 1 << 30

    def malloc(self, num_bytes: int, stream: Hashable = 0) -> Block:
        """Serve a request of ``num_bytes``."""
        settings = self.settings
        size = round_request(num_bytes, settings.roundup_power2_divisions)
        is_small = size <= SMALL
        pool = self._pools[stream, is_small]
        block = self._find(pool, size) or (self._grow if settings.expandable_segments else self._add)(pool, size)
        remaining, limit = block.size - size, settings.max_split_bytes
        if is_small or settings.expandable_segments:
            is_to_split = remaining >= MIN_BLOCK
        else:
            is_to_split = remaining > SMALL and (limit is None or size < limit)
        if is_to_split:
            rest = block.split(size)
            rest.is_free = True
            insort(pool.free, (rest.size, rest.address, rest))  # its neighbours are in use
        block.requested_bytes = num_bytes
        self.allocated_bytes += block.size
        return block

    def free(self, block: Block) -> None:
        """Take a block back."""
        self.allocated_bytes -= block.size
        block.pool.put(block)

    def _find(self, pool: Pool, size: int) -> Block | None:
        """Take the smallest free block that serves ``size`` out of the pool, one that can grow as the last."""
        index = bisect_left(pool.free, (size,))
        if index == len(pool.free):
            return None
        settings, limit = self.settings, self.settings.max_split_bytes
        can_grow = settings.expandable_segments and pool.free[index][2] is pool.last
        if can_grow and index + 1 < len(pool.free):
            index += 1
        block = pool.free[index][2]
        too_large = block.size >= size + settings.max_non_split_rounding_bytes
        if limit is not None and block.size >= limit and (size < limit or too_large):
            return None  # what is not split is kept for what needs it
        del pool.free[index]
        block.is_free = False
        return block

    def _add(self, pool: Pool, size: int) -> Block:
        """Make a segment, by one ``cudaMalloc``, for a block of ``size``."""
        if size <= SMALL:
            num_bytes = SMALL_SEGMENT
        else:
            num_bytes = self.settings.large_segment_bytes if size < MIN_LARGE else round_up(size, ROUND_LARGE)
        pool.last = Block(self._next_address, num_bytes, pool)
        self._next_address += num_bytes
        self.reserved_bytes += num_bytes
        return pool.last

    def _grow(self, pool: Pool, size: int) -> Block:
        """Map pages behind the expandable segment of a pool until ``size`` bytes are free there."""
        page_bytes, last = SMALL_SEGMENT if size <= SMALL else self.settings.large_segment_bytes, pool.last
        if last is None or not last.is_free:
            address = self._next_address if last is None else last.address + last.size
            self._next_address += _ADDRESSES if last is None else 0
            pool.last = Block(address, 0, pool, last)
            if last is not None:
                last.next = pool.last
            last = pool.last
        else:
            pool.remove(last)
        num_bytes = round_up(max(0, size - last.size), page_bytes)
        self.reserved_bytes += num_bytes
        last.size += num_bytes
        return last


_DROPOUT = "aten.native_dropout.default"  # returns its mask second, and makes it first
_SUM = "aten.add.Tensor"


def as_on_gpu(timeline: MemoryTimeline) -> MemoryTimeline:
    """Return a timeline as long, in which dropout makes its mask first and autograd sums gradients in place.

    Autograd adds to a gradient that nobody else holds, but never to a fake one (``can_accumulate_inplace`` of
    torch/csrc/autograd/input_buffer.cpp): there the sum is made before its parts are dropped.
    """
    events = list(timeline.events)
    for index in range(len(events) - 1):
        first, second = events[index : index + 2]
        made = timeline.allocations[first.allocation]
        if made.op == _DROPOUT:
            is_next = second.allocation == first.allocation + 1  # of the same call: the mask is the smaller result
            is_late = is_next and first.change_bytes > second.change_bytes > 0
        else:
            is_autograd = made.op == _SUM and not made.module and first.phase is Phase.BACKWARD
            is_late = is_autograd and 0 < first.change_bytes == -second.change_bytes
        if is_late and first.allocation != second.allocation:
            events[index : index + 2] = second, first
    return replace(timeline, events=tuple(events))


class AllocatorReplay:
    """What the allocator of its device holds over a timeline; of several steps, the second stands for all later ones.

    ``allocated``: most bytes in used blocks at each event, with scratch of its operator. ``reserved``: bytes taken from
    the driver, after each event. ``workspace_bytes``: the most that libraries took at once, in addition to tensors.
    """

    def __init__(self, timeline: MemoryTimeline, workspaces: Workspaces, settings: AllocatorSettings) -> None:
        self._allocator = CachingAllocator(settings)
        self._workspaces = workspaces
        self._persistent_bytes = self._most_scratch_bytes = 0
        self._taken: set[tuple[int, int, bool]] = set()
        self._blocks: dict[int, Block] = {}
        allocated, reserved = [], []
        for event in timeline.events:
            allocation = timeline.allocations[event.allocation]
            scratch_bytes = self._play(event, allocation) if allocation.device == timeline.device else 0
            allocated.append(self._allocator.allocated_bytes + scratch_bytes)
            reserved.append(self._allocator.reserved_bytes)
        self.allocated, self.reserved = tuple(allocated), tuple(reserved)
        self.workspace_bytes = self._persistent_bytes + self._most_scratch_bytes

    def _play(self, event: MemoryEvent, allocation: Allocation) -> int:
        """Let an allocation grow or shrink; return what its operator used for a moment in addition.

        As in a storage that grows, the new block is there before the old one is freed.
        """
        allocator, stream = self._allocator, allocation.stream
        block = self._blocks.pop(event.allocation, None)
        num_bytes = event.change_bytes + (block.requested_bytes if block is not None else 0)
        if num_bytes:
            self._blocks[event.allocation] = allocator.malloc(num_bytes, stream)
        if block is not None:
            allocator.free(block)
        if event.change_bytes <= 0:
            return 0
        kept_bytes = self._workspaces.persistent_bytes.get(allocation.op, ())  # from its first run on
        for library, num_bytes in enumerate(kept_bytes):
            key = library, stream, event.phase is Phase.BACKWARD
            if key not in self._taken:
                self._taken.add(key)
                self._persistent_bytes += allocator.malloc(num_bytes, stream).size
        if not (num_bytes := self._workspaces.scratch_bytes.get(allocation.op, 0)):
            return 0
        block = allocator.malloc(num_bytes, stream)
        scratch_bytes = block.size  # before it grows by free neighbours
        allocator.free(block)
        self._most_scratch_bytes = max(self._most_scratch_bytes, scratch_bytes)
        return scratch_bytes
