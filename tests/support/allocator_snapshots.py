"""A trace that the real allocator has recorded, replayed through the simulated one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from lightning_vram.memory.estimate.caching_allocator import AllocatorSettings, Block, CachingAllocator

Segment = Mapping[str, Any]
_NO_PRIVATE_POOL = (0, 0)
_TAKES = ("segment_alloc", "segment_map")


@dataclass(frozen=True)
class SnapshotReplay:
    """What both allocators had reserved, after each ``alloc`` and ``free_completed`` of a trace."""

    recorded: tuple[int, ...]
    simulated: tuple[int, ...]
    allocated: tuple[int, ...]  # in blocks in use, of the simulated one
    peak_allocated_bytes: int  # the start included
    num_unknown: int  # frees of blocks that neither the start nor the trace tells of, which are left out

    @property
    def recorded_peak_bytes(self) -> int:
        return max(self.recorded, default=0)

    @property
    def simulated_peak_bytes(self) -> int:
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
    segments: Iterable[Segment] = (),
) -> SnapshotReplay:
    """Replay one of the ``device_traces`` of ``torch.cuda.memory._snapshot()``; the process has given no segment back.

    ``segments`` are those of a snapshot from before the first entry; none, if the trace begins with the process.
    """
    allocator = CachingAllocator(settings)
    blocks = restore(allocator, segments)
    reserved_bytes, num_unknown = allocator.reserved_bytes, 0
    start_bytes = allocator.allocated_bytes
    recorded, simulated, allocated = [], [], []
    for entry in trace:
        action, address = entry["action"], entry["addr"]
        if action in _TAKES:
            reserved_bytes += entry["size"]
        if action == "alloc":
            blocks[address] = allocator.malloc(entry["size"], stream_of(entry))
        elif action == "free_completed" and address in blocks:
            allocator.free(blocks.pop(address))
        elif action == "free_completed":
            num_unknown += 1
        if action in ("alloc", "free_completed"):
            recorded.append(reserved_bytes)
            simulated.append(allocator.reserved_bytes)
            allocated.append(allocator.allocated_bytes)
    peak_bytes = max([start_bytes, *allocated])
    return SnapshotReplay(tuple(recorded), tuple(simulated), tuple(allocated), peak_bytes, num_unknown)


def restore(allocator: CachingAllocator, segments: Iterable[Segment]) -> dict[int, Block]:
    """Let a new allocator have these segments (expandable ones in one piece), and return blocks in use by address."""
    blocks: dict[int, Block] = {}
    for segment in segments:
        pool = allocator._pools[stream_of(segment), segment["segment_type"] == "small"]
        assert pool.last is None or not allocator.settings.expandable_segments
        allocator.reserved_bytes += segment["total_size"]
        pieces = [Block(entry["address"], entry["size"], pool) for entry in segment["blocks"]]
        for block, behind in pairwise(pieces):
            block.next, behind.previous = behind, block
        pool.last = pieces[-1]
        for block, entry in zip(pieces, segment["blocks"], strict=True):
            if entry["state"] == "inactive":
                pool.put(block)
            else:
                block.requested_bytes = entry["requested_size"]
                allocator.allocated_bytes += block.size
                blocks[block.address] = block
    return blocks


def stream_of(entry: Mapping[str, Any]) -> Any:
    """Return what keeps blocks of an entry or a segment apart from others: the stream, and a graph's private pool."""
    pool = tuple(entry.get("segment_pool_id") or entry.get("pool_id") or _NO_PRIVATE_POOL)
    return entry["stream"] if pool == _NO_PRIVATE_POOL else (pool, entry["stream"])
