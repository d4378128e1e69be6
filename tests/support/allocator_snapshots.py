"""A trace that the real allocator has recorded, replayed through the simulated one."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lightning_vram.memory.estimate.caching_allocator import (
    AllocatorSettings,
    Block,
    CachingAllocator,
    ExpandableSegments,
    Pool,
)

Segment = Mapping[str, Any]
_NO_PRIVATE_POOL = (0, 0)
_TAKES = ("segment_alloc", "segment_map")
_GIVES = ("segment_free", "segment_unmap")


@dataclass(frozen=True)
class SnapshotReplay:
    """What both allocators had reserved, after each ``alloc`` and ``free_completed`` of a trace.

    Args:
        recorded: Bytes that the real one had reserved.
        simulated: Bytes that the simulated one has.
        allocated: Bytes that the simulated one has in blocks in use.
        peak_allocated_bytes: Most of them, the start included.
        num_unknown: Frees of blocks that neither the start nor the trace tells of: they are left out.
    """

    recorded: tuple[int, ...]
    simulated: tuple[int, ...]
    allocated: tuple[int, ...]
    peak_allocated_bytes: int
    num_unknown: int

    @property
    def recorded_peak_bytes(self) -> int:
        """Most that the real one had reserved."""
        return max(self.recorded, default=0)

    @property
    def simulated_peak_bytes(self) -> int:
        """Most that the simulated one had."""
        return max(self.simulated, default=0)

    @property
    def worst_error(self) -> float:
        """Largest difference between the two at any moment, as a part of the recorded peak."""
        differences = (abs(one - other) for one, other in zip(self.recorded, self.simulated, strict=True))
        return max(differences, default=0) / max(self.recorded_peak_bytes, 1)


def replay_snapshot(
    trace: Sequence[Mapping[str, Any]],
    *,
    settings: AllocatorSettings | None = None,
    segments: Iterable[Mapping[str, Any]] = (),
) -> SnapshotReplay:
    """Replay a trace of ``torch.cuda.memory._snapshot()``.

    Give back what the trace says was given back, and compare how much was taken. With ``max_split_size_mb`` a card
    that is full gives back only part of its cache, which is taken for all of it here.

    Args:
        trace: One of the snapshot's ``device_traces``.
        settings: Those of the process that was recorded. ``None`` takes PyTorch's defaults.
        segments: ``segments`` of a snapshot from before the first entry. None, if the trace begins with the process.

    Example:
        >>> entry = {"action": "segment_alloc", "addr": 0, "size": 2097152, "stream": 0}
        >>> replay_snapshot([entry, {"action": "alloc", "addr": 0, "size": 512, "stream": 0}]).worst_error
        0.0
    """
    allocator = CachingAllocator(settings)
    player = _Player(allocator, restore(allocator, segments))
    reserved_bytes = allocator.reserved_bytes
    recorded, simulated, allocated = [], [], []
    previous = ""
    for entry in trace:
        action = entry["action"]
        if action in _TAKES:
            reserved_bytes += entry["size"]
        elif action in _GIVES:
            reserved_bytes -= entry["size"]
            if previous not in _GIVES:  # all at once
                allocator.empty_cache()
        elif player.follow(entry):
            recorded.append(reserved_bytes)
            simulated.append(allocator.reserved_bytes)
            allocated.append(allocator.statistics.allocated_bytes)
        previous = action
    return SnapshotReplay(
        recorded=tuple(recorded),
        simulated=tuple(simulated),
        allocated=tuple(allocated),
        peak_allocated_bytes=allocator.statistics.peak_allocated_bytes,
        num_unknown=player.num_unknown,
    )


class _Player:
    """Does what the entries say.

    Args:
        allocator: To do it with.
        blocks: In use, by the address that the trace knows them by.
    """

    def __init__(self, allocator: CachingAllocator, blocks: dict[int, Block]) -> None:
        self._allocator = allocator
        self._blocks = blocks
        self.num_unknown = 0

    def follow(self, entry: Mapping[str, Any]) -> bool:
        """Follow an entry; whether it was one that changes what is in use."""
        match entry["action"]:
            case "alloc":
                self._blocks[entry["addr"]] = self._allocator.malloc(entry["size"], stream_of(entry))
            case "free_requested" if entry["addr"] in self._blocks:
                self._allocator.request_free(self._blocks[entry["addr"]])
                return False  # the real one may free it any time from here on
            case "free_completed" if entry["addr"] in self._blocks:
                block = self._blocks.pop(entry["addr"])
                if block.is_allocated:  # a trace that was cut, or tells of ends only
                    self._allocator.request_free(block)
                self._allocator.complete_free(block)
            case "free_completed":
                self.num_unknown += 1
            case _:
                return False
        return True


def restore(allocator: CachingAllocator, segments: Iterable[Segment]) -> dict[int, Block]:
    """Let an allocator, new so far, have these segments.

    Args:
        allocator: Of the same settings as the real one.
        segments: Of ``torch.cuda.memory._snapshot()``.

    Returns:
        The blocks in use, by address.
    """
    blocks: dict[int, Block] = {}
    ranges: dict[Pool, list[Segment]] = defaultdict(list)
    for segment in segments:
        pool = allocator.pool_of(stream_of(segment), is_small=segment["segment_type"] == "small")
        allocator.device_memory.take(segment["total_size"])
        if isinstance(allocator.segments, ExpandableSegments):
            ranges[pool].append(segment)
        else:
            _fill(allocator, [_piece(pool, entry, None) for entry in segment["blocks"]], segment["blocks"], blocks)
    for pool, mapped in ranges.items():
        _restore_expandable(allocator, pool, sorted(mapped, key=lambda segment: int(segment["address"])), blocks)
    return blocks


def stream_of(entry: Mapping[str, Any]) -> Hashable:
    """Return what keeps blocks of an entry or a segment apart from others: the stream, and a graph's private pool."""
    pool = tuple(entry.get("segment_pool_id") or entry.get("pool_id") or _NO_PRIVATE_POOL)
    return entry["stream"] if pool == _NO_PRIVATE_POOL else (pool, entry["stream"])


def _restore_expandable(
    allocator: CachingAllocator, pool: Pool, ranges: Sequence[Segment], blocks: dict[int, Block]
) -> None:
    """Rebuild one segment of the ranges that are mapped, with the gaps between them and behind the last."""
    assert isinstance(allocator.segments, ExpandableSegments)
    start = position = ranges[0]["address"]
    end = start + allocator.segments.address_space_bytes(pool)
    pieces, entries = [], []
    for segment in (*ranges, {"address": end, "total_size": 0, "blocks": ()}):
        if segment["address"] > position:
            gap = Block(position, segment["address"] - position, pool, start)
            gap.is_mapped = False
            pieces.append(gap)
            entries.append({"state": "inactive"})
        pieces += [_piece(pool, entry, start) for entry in segment["blocks"]]
        entries += segment["blocks"]
        position = segment["address"] + segment["total_size"]
    _fill(allocator, pieces, entries, blocks)


def _piece(pool: Pool, entry: Mapping[str, Any], segment_start: int | None) -> Block:
    return Block(entry["address"], entry["size"], pool, segment_start)


def _fill(
    allocator: CachingAllocator,
    pieces: Sequence[Block],
    entries: Sequence[Mapping[str, Any]],
    blocks: dict[int, Block],
) -> None:
    """Make neighbours of pieces, and let each be in use or free."""
    for block, behind in pairwise(pieces):
        block.next, behind.previous = behind, block
    for block, entry in zip(pieces, entries, strict=True):
        if entry["state"] == "inactive":
            block.pool.put(block)
            continue
        allocator.hand_out(block, entry.get("requested_size", block.size))
        if entry["state"] != "active_allocated":
            allocator.request_free(block)
        blocks[block.address] = block
