"""A trace that the real allocator has recorded, replayed through the simulated one."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_vram.memory.estimate.caching_allocator.allocator import CachingAllocator
from lightning_vram.memory.estimate.caching_allocator.blocks import Block
from lightning_vram.memory.estimate.caching_allocator.restored import restore, stream_of
from lightning_vram.memory.estimate.caching_allocator.settings import AllocatorSettings

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
