"""What an out-of-memory error says of the request that failed, and of the device at that moment."""

import re
from dataclasses import dataclass, replace

import torch

from lightning_vram.memory.device.allocator import has_cache, read_allocator
from lightning_vram.memory.device.process_limit import limited_share
from lightning_vram.memory.units import parse_bytes

_SIZE = r"([\d.]+ (?:[KMGT]iB|bytes))"
_WORDS = {
    "asked_bytes": rf"ried to allocate {_SIZE}",
    "total_bytes": rf"total capacity of {_SIZE}",
    "free_bytes": rf"of which {_SIZE} is free",
    "process_bytes": rf"this process has {_SIZE} memory in use",
    "limit_bytes": rf"{_SIZE} allowed",
    "allocated_bytes": rf"{_SIZE} is allocated by PyTorch",
    "cached_bytes": rf"{_SIZE} is reserved by PyTorch but unallocated",
}
_A_PROCESS = re.compile(rf"Process \d+ has {_SIZE}")
_ROUNDED = 0.99  # two decimals of a size


@dataclass(frozen=True)
class FailedRequest:
    """Bytes at the moment memory ran out. ``None``: unknown."""

    asked_bytes: int | None = None  # bytes of the request
    total_bytes: int | None = None  # of the device
    free_bytes: int | None = None  # of those, free
    process_bytes: int | None = None  # taken by this process, the driver's part included
    limit_bytes: int | None = None  # per-process limit, if there is one
    allocated_bytes: int | None = None  # in tensors of this process
    cached_bytes: int | None = None  # reserved by this process and not in tensors

    @property
    def other_bytes(self) -> int:
        """Bytes of other processes; 0 if unknown."""
        if self.total_bytes is None or self.free_bytes is None or self.process_bytes is None:
            return 0
        return max(0, self.total_bytes - self.free_bytes - self.process_bytes)

    @property
    def driver_bytes(self) -> int:
        """Bytes of the driver for this process; 0 if unknown."""
        if self.process_bytes is None or self.allocated_bytes is None:
            return 0
        return max(0, self.process_bytes - self.allocated_bytes - (self.cached_bytes or 0))

    @property
    def room_bytes(self) -> int | None:
        """Bytes that tensors of this process could have had in all."""
        if self.total_bytes is None:
            return None
        room_bytes = self.total_bytes - self.other_bytes - self.driver_bytes
        return room_bytes if self.limit_bytes is None else min(room_bytes, self.limit_bytes)


def read_failed_request(message: str, device: torch.device) -> FailedRequest:
    """Read the message of an error, and ask the device for what it leaves out."""
    found = {name: re.search(words, message) for name, words in _WORDS.items()}
    said = FailedRequest(**{name: _bytes_of(match[1]) for name, match in found.items() if match})
    if said.process_bytes is None:
        said = replace(said, process_bytes=_process_bytes(message, said))
    if not has_cache(device):
        return said
    now = read_allocator(device)
    if said.allocated_bytes is None:
        said = replace(said, allocated_bytes=now.allocated_bytes, cached_bytes=now.fragmentation_bytes)
    if said.total_bytes is None:
        free_bytes, total_bytes = torch.get_device_module(device).mem_get_info(device)
        said = replace(said, total_bytes=int(total_bytes), free_bytes=int(free_bytes))
    share = limited_share(device)
    if said.limit_bytes is None and share < 1:
        said = replace(said, limit_bytes=int(share * (said.total_bytes or 0)))
    return said


def _process_bytes(message: str, said: FailedRequest) -> int | None:
    """Find this process among those listed: the smallest that can hold its bytes, as containers renumber them."""
    own_bytes = (said.allocated_bytes or 0) + (said.cached_bytes or 0)
    sizes = [size for size in map(_bytes_of, _A_PROCESS.findall(message)) if size >= _ROUNDED * own_bytes]
    return min(sizes, default=None) if own_bytes else None


def _bytes_of(text: str) -> int:
    return parse_bytes(text.replace("bytes", "B"))
