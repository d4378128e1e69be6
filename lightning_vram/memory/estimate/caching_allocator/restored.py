"""The simulated allocator brought to where a real one was when its trace began."""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from lightning_vram.memory.estimate.caching_allocator.allocator import CachingAllocator
from lightning_vram.memory.estimate.caching_allocator.blocks import Block, Pool
from lightning_vram.memory.estimate.caching_allocator.expandable_segments import ExpandableSegments

Segment = Mapping[str, Any]
_NO_PRIVATE_POOL = (0, 0)


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
