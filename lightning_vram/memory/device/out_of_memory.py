"""Recognize out-of-memory errors of any library, and read what they say about the failed request."""

import errno
import pickle
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_vram.memory.device.accelerators import has_cache, limited_share, memory_info, read_allocator
from lightning_vram.memory.units import parse_bytes
from lightning_vram.private_names.dispatcher import read_snapshot


class OutOfMemorySource(StrEnum):
    """Whose memory ran out."""

    DEVICE = "device"
    HOST = "host"


# Of RuntimeErrors.
_ON_DEVICE = (
    r"(CUDA|HIP|XPU|MPS backend) out of memory|(CUDA|HIP) (driver )?error: out of memory|hipErrorOutOfMemory",
    r"CUDA_ERROR_OUT_OF_MEMORY|cudaErrorMemoryAllocation|(UR_RESULT|PI)_ERROR_OUT_OF_(DEVICE|HOST|RESOURCES)",
    r"cuda runtime error \(2\) : out of memory|Triton Error \[CUDA\]: out of memory",
    r"nccl[^\n]*(error|failure)[^\n]*'out of memory'|Invalid buffer size: [\d.]+ [GT]i?B",
    r"(CU|HIP)(BLAS|DNN|FFT|SOLVER|SPARSE)_(STATUS_)?ALLOC_FAILED|CUSPARSE_STATUS_INSUFFICIENT_RESOURCES",
    r"CUDNN_STATUS_INTERNAL_ERROR_(DEVICE|HOST)_ALLOCATION_FAILED|rocblas_status_memory_error|miopenStatusAllocFailed",
    # cuDNN tries its algorithms in turn; where none got its workspace, this is all that is left of the reason.
    r"Unable to find a valid cuDNN algorithm to run convolution",
)
_ON_HOST = (
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|std::bad_alloc|bad allocation",
    r"unable to (mmap|allocate shared memory)[^\n]* Cannot allocate memory",
    r"Couldn't open shared file mapping[^\n]*<1455>",
)
_PATTERNS = {  # the device first: its libraries' messages may name both
    OutOfMemorySource.DEVICE: re.compile("|".join(_ON_DEVICE), re.IGNORECASE),
    OutOfMemorySource.HOST: re.compile("|".join(_ON_HOST), re.IGNORECASE),
}


def read_out_of_memory(error: BaseException) -> OutOfMemorySource | None:
    """Find out whether ``error`` means that memory ran out, and whose.

    Follows the causes of an error (``raise ... from``), groups, and errors of spawned workers.

    Example:
        >>> read_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"))
        <OutOfMemorySource.DEVICE: 'device'>
        >>> read_out_of_memory(RuntimeError("shape mismatch")) is None
        True
    """
    path = path_to_out_of_memory(error)
    return _read_one(path[-1]) if path else None


def path_to_out_of_memory(error: BaseException) -> tuple[BaseException, ...]:
    """Return the errors from ``error``, the outermost, to the one that says that memory ran out; empty if none does."""
    return next((path for path in _paths(error) if _read_one(path[-1]) is not None), ())


def is_out_of_memory(error: BaseException) -> bool:
    """Whether ``error`` means that memory ran out, on the device or on the host: see :func:`read_out_of_memory`."""
    return read_out_of_memory(error) is not None


def release_frames(error: BaseException) -> None:
    """Drop the tracebacks of ``error`` and its causes, and with them all tensors that were alive in their frames."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        link.__traceback__ = None
        waiting += [link.__cause__, link.__context__, *getattr(link, "exceptions", ())]


def _paths(error: BaseException, above: tuple[BaseException, ...] = ()) -> Iterator[tuple[BaseException, ...]]:
    link: BaseException | None = error
    while link is not None and all(link is not other for other in above):
        above = (*above, link)
        yield above
        if isinstance(link, BaseExceptionGroup):
            for member in link.exceptions:
                yield from _paths(member, above)
        link = link.__cause__


def _read_one(error: BaseException) -> OutOfMemorySource | None:
    if isinstance(error, MemoryError):
        return OutOfMemorySource.HOST
    if isinstance(error, OSError):
        return OutOfMemorySource.HOST if error.errno == errno.ENOMEM else None
    if not isinstance(error, RuntimeError | ProcessRaisedException):  # the latter holds a worker's traceback as text
        return None
    message = str(error)
    found = next((source for source, pattern in _PATTERNS.items() if pattern.search(message)), None)
    if found is None and isinstance(error, torch.OutOfMemoryError):
        return OutOfMemorySource.DEVICE  # the class is enough, whatever a future version writes in it
    return found


_SIZE = r"([\d.]+ (?:[KMGT]iB|bytes))"
_WORDS = {
    "asked_bytes": rf"(?:ried to allocate|Invalid buffer size:) {_SIZE}",
    "total_bytes": rf"total capacity of {_SIZE}",
    "free_bytes": rf"of which {_SIZE} is free",
    "process_bytes": rf"this process has {_SIZE} memory in use",
    "limit_bytes": rf"{_SIZE} allowed|max allowed: {_SIZE}",
    "allocated_bytes": rf"{_SIZE} is allocated by PyTorch",
    "cached_bytes": rf"{_SIZE} is reserved by PyTorch but unallocated",
}
# Of Apple GPUs: what the allocator holds, tensors and cache, and what Metal uses in addition.
_OF_METAL = re.compile(rf"MPS allocated: {_SIZE}, other allocations: {_SIZE}")
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
    said = FailedRequest(**{name: _bytes_of(match[match.lastindex or 0]) for name, match in found.items() if match})
    if said.process_bytes is None:
        # The smallest of those listed that can hold its bytes is this process, as containers renumber them.
        own_bytes = (said.allocated_bytes or 0) + (said.cached_bytes or 0)
        sizes = [size for size in map(_bytes_of, _A_PROCESS.findall(message)) if size >= _ROUNDED * own_bytes]
        said = replace(said, process_bytes=min(sizes, default=None) if own_bytes else None)
    if not has_cache(device):
        return said
    now = read_allocator(device)
    if said.allocated_bytes is None:
        said = replace(said, allocated_bytes=now.allocated_bytes, cached_bytes=now.fragmentation_bytes)
    if (metal := _OF_METAL.search(message)) is not None:
        held_bytes, other_bytes = map(_bytes_of, metal.groups())
        cached_bytes = max(0, held_bytes - now.allocated_bytes)
        said = replace(said, cached_bytes=cached_bytes, process_bytes=held_bytes + other_bytes)
    if said.total_bytes is None:
        free_bytes, total_bytes = memory_info(device)
        said = replace(said, total_bytes=total_bytes, free_bytes=free_bytes)
    share = limited_share(device)
    if said.limit_bytes is None and share < 1:
        said = replace(said, limit_bytes=int(share * (said.total_bytes or 0)))
    return said


def _bytes_of(text: str) -> int:
    return parse_bytes(text.replace("bytes", "B"))


def write_snapshot(path: Path, kind: str) -> bool:
    """Write the blocks of the allocator of CUDA, ROCm or XPU; whether there was anything to write."""
    snapshot = read_snapshot(kind)
    if snapshot is None:
        return False
    path.write_bytes(pickle.dumps(snapshot))
    return True
