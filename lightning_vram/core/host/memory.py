"""Host memory: chunks used again in every step, pinned where there is a GPU, and weights split in two halves."""

import mmap
import os
import sys
import threading
import warnings
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.memory.device.accelerators import can_pin_in_place, pin_in_place
from lightning_vram.memory.host import available_host_bytes
from lightning_vram.memory.units import GIB, MIB, format_bytes
from lightning_vram.private_names.dispatcher import FakeTensor, detect_fake_mode, without_dispatch, without_modes
from lightning_vram.private_names.torch import free_pinned_memory

FIRST_CHUNK_BYTES = MIB
LARGEST_CHUNK_BYTES = 64 * MIB
ALIGNMENT_BYTES = 64  # of any dtype, and of a cache line

Space = TypeVar("Space")  # a stretch of memory, or of a file


@dataclass(slots=True, eq=False)
class _Chunk(Generic[Space]):
    space: Space
    size: int
    used: int = 0
    num_blocks: int = 0


@dataclass(slots=True, eq=False)
class Block(Generic[Space]):
    """Space that is taken as long as this object lives: pieces, in order."""

    pieces: list[Space]
    chunks: list[_Chunk[Space]]
    _released: "deque[list[_Chunk[Space]]]"

    def __del__(self) -> None:
        # In whatever thread, perhaps in the middle of anything: appending is atomic, the rest waits for its turn.
        self._released.append(self.chunks)


class ChunkedSpace(ABC, Generic[Space]):
    """Space in chunks of 1 to 64 MiB, which grows and never shrinks. Safe to use from several threads.

    A chunk is free again when the last block in it is gone: as a training step frees all, the first one's is enough.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: _Chunk[Space] | None = None
        self._free: list[_Chunk[Space]] = []
        self._last_size = 0
        self._released: deque[list[_Chunk[Space]]] = deque()
        self._num_blocks = 0
        self.total_bytes = 0  # of all chunks

    @abstractmethod
    def _make_chunks(self, sizes: list[int]) -> list[Space]:
        """Return chunks of given sizes; an error if there is no space, and nothing is taken then."""

    @abstractmethod
    def _cut(self, space: Space, start: int, num_bytes: int) -> Space:
        """Return a stretch of a chunk."""

    @property
    def num_blocks(self) -> int:
        """Blocks that are alive."""
        with self._lock:
            self._collect()
            return self._num_blocks

    def take(self, num_bytes: int) -> Block[Space]:
        """Return a block of at least 1 byte."""
        with self._lock:
            self._collect()
            rounded = -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            chunks = self._free if self._open is None else [*self._free, self._open]
            self._grow(rounded - sum(chunk.size - chunk.used for chunk in chunks))
            # First of all: should filling it be interrupted, what it has by then comes back with it.
            block: Block[Space] = Block([], [], self._released)
            self._num_blocks += 1
            while rounded:
                if self._open is None or self._open.used == self._open.size:
                    self._open = self._free.pop()
                chunk = self._open
                length = min(rounded, chunk.size - chunk.used)
                block.pieces.append(self._cut(chunk.space, chunk.used, min(length, num_bytes)))
                chunk.num_blocks += 1
                block.chunks.append(chunk)
                chunk.used += length
                rounded -= length
                num_bytes -= length
            return block

    def _grow(self, missing_bytes: int) -> None:
        sizes: list[int] = []
        last = self._last_size
        while missing_bytes > sum(sizes):
            last = min(2 * last, LARGEST_CHUNK_BYTES) or FIRST_CHUNK_BYTES
            sizes.append(last)
        made = map(_Chunk, self._make_chunks(sizes), sizes) if sizes else ()
        self._free[:0] = reversed(list(made))
        self._last_size = last
        self.total_bytes += sum(sizes)

    def _collect(self) -> None:
        while self._released:
            self._num_blocks -= 1
            for chunk in self._released.popleft():
                chunk.num_blocks -= 1
                if chunk.num_blocks == 0:
                    chunk.used = 0
                    if chunk is not self._open:
                        self._free.append(chunk)


MARGIN_BYTES = GIB  # left to everything else on the host

_warned: list[int] = []  # bytes of the warning of this process
_never_unmapped: list[mmap.mmap] = []


class OffloadError(RuntimeError):
    """The host or the disk is too small, or fails."""


class HostArena(ChunkedSpace[Tensor]):
    """Host memory, flat tensors of bytes, pinned (needs an accelerator) or not, given back by :meth:`close`.

    A host that is too small is an ``OffloadError``: it would kill the process. ``like`` is a fake tensor for fake
    memory.
    """

    def __init__(self, *, pin_memory: bool, like: Tensor | None = None) -> None:
        super().__init__()
        self._pin_memory, self._like = pin_memory, like

    def close(self) -> None:
        """Give all memory back. A tensor that is still in it stays readable, and keeps its chunk."""
        super().__init__()
        if self._pin_memory and self._like is None:
            free_pinned_memory()  # else PyTorch keeps it, pinned, for itself

    @override
    def _cut(self, space: Tensor, start: int, num_bytes: int) -> Tensor:
        with hidden_from_modes(space):
            return space.narrow(0, start, num_bytes)

    @override
    def _make_chunks(self, sizes: list[int]) -> list[Tensor]:
        if self._like is not None:
            # An estimate for a GPU counts it, one for the host does not.
            with hidden_from_modes(self._like) if self._like.is_cpu else nullcontext():
                chunks = [self._like.new_empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
                return [chunk.pin_memory() for chunk in chunks] if self._pin_memory else chunks
        check_host_bytes(sum(sizes), self.total_bytes)
        with without_dispatch():  # who counts memory counts that of the device
            return [make_host_bytes(size, pin_memory=self._pin_memory) for size in sizes]


def check_host_bytes(needed_bytes: int, taken_bytes: int = 0) -> None:
    """Raise ``OffloadError`` if less host memory is available than needed, with 1 GiB left for everything else."""
    available = available_host_bytes()
    if available is None or needed_bytes <= available - MARGIN_BYTES:
        return
    taken = f" in addition to {format_bytes(taken_bytes)}" if taken_bytes else ""
    raise OffloadError(
        f"activation offload needs {format_bytes(needed_bytes)} of host memory{taken}, but "
        f"{format_bytes(available)} are available, of which {format_bytes(MARGIN_BYTES)} must stay free. Set disk_path "
        'to a folder on a fast disk, set compress="bf16", use a smaller batch, or add ActivationCheckpointing.'
    )


def margin_bytes(taken_bytes: int) -> int:
    """Return what must stay free: as much again for small models, so that a toy runs on a full machine."""
    return min(MARGIN_BYTES, max(0, taken_bytes))


def make_host_bytes(num_bytes: int, *, pin_memory: bool) -> Tensor:
    """Return a flat tensor of bytes on the host."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin_memory)


def make_host_tensor(numel: int, dtype: torch.dtype, *, pin_memory: bool) -> Tensor:
    """Return an uninitialised flat tensor on the host, for as long as training takes, pinned if CUDA lets us.

    PyTorch rounds up what it pins to powers of two (1.78 times measured), and keeps it: here pages are registered.
    """
    if not pin_memory or not numel:
        return torch.empty(numel, dtype=dtype, device="cpu")
    tensor = empty_on_own_pages(numel, dtype)
    if pin_in_place(tensor):
        return tensor
    if not can_pin_in_place(tensor):
        return tensor.pin_memory()
    if not _warned:
        _warned.append(tensor.nbytes)
        warnings.warn(
            f"CUDA could not pin {format_bytes(tensor.nbytes)} of host memory (cudaHostRegister): it stays unpinned, "
            "so its copies do not overlap with computation. Later allocations may stay unpinned, too.",
            stacklevel=1,
        )
    return tensor


def empty_on_own_pages(numel: int, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor of zeros that shares no page with other memory, and that a fork does not copy."""
    if sys.platform != "linux" or detect_fake_mode() is not None:
        return torch.empty(numel, dtype=dtype, device="cpu")
    mapping = mmap.mmap(-1, numel * dtype.itemsize, flags=mmap.MAP_PRIVATE)
    mapping.madvise(mmap.MADV_DONTFORK)  # Linux copies pinned pages in the fork itself, for each DataLoader worker
    with suppress(OSError):  # a kernel without huge pages
        mapping.madvise(mmap.MADV_HUGEPAGE)
    # The kernel zeroes each page at its first use: here in all threads, where pinning would do it in one. On the host
    # of an H100 4 GiB are so pinned at 16 GB/s, and otherwise at 2.
    tensor = torch.frombuffer(mapping, dtype=dtype).zero_()
    # The newest finalizer runs first: the mapping, which this one holds, outlives the one that unregisters it.
    weakref.finalize(tensor.untyped_storage(), _let_go, mapping, os.getpid())
    return tensor


def _let_go(mapping: mmap.mmap, owner: int) -> None:
    """Drop a mapping. A forked process does not have it: unmapping would hit other memory at its addresses there."""
    if os.getpid() != owner:
        _never_unmapped.append(mapping)


def hidden_from_modes(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which no dispatch mode sees what is done to ``tensor``, except the mode of fake tensors."""
    return without_modes() if isinstance(tensor, FakeTensor) else without_dispatch()


_MOST_IDLE = 8  # backwards: how many gradients are on their way at once differs from one to the next


@dataclass(slots=True, eq=False)
class _Buffer:
    """Memory, and the storage given out of it, which lives as long as any tensor over it."""

    memory: Tensor
    given: "weakref.ref[torch.UntypedStorage] | None" = None
    num_idle: int = 0  # backwards in a row that it was not needed in

    @property
    def is_free(self) -> bool:
        return self.given is None or self.given() is None


class HostBuffers:
    """Gives out flat tensors in sizes that recur, as gradients do; called by one thread at a time.

    Memory is given out again when no tensor uses it any more: hold a tensor until a copy to it has finished.
    """

    def __init__(self, *, pin_memory: bool) -> None:
        self._pin_memory = pin_memory
        self._buffers: list[_Buffer] = []

    @property
    def total_bytes(self) -> int:
        """Bytes held here, given out or not."""
        return sum(buffer.memory.nbytes for buffer in self._buffers)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor: over the smallest memory that is free and large enough, or new memory."""
        num_bytes = numel * dtype.itemsize
        if not self._pin_memory or not num_bytes or detect_fake_mode() is not None:
            return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=self._pin_memory)
        fitting = (one for one in self._buffers if one.memory.nbytes >= num_bytes and one.is_free)
        buffer = min(fitting, key=lambda one: one.memory.nbytes, default=None)
        with without_dispatch():  # who counts memory counts that of the device
            if buffer is None:
                buffer = _Buffer(make_host_tensor(num_bytes, torch.uint8, pin_memory=True))
                self._buffers.append(buffer)
            storage = buffer.memory.untyped_storage()[:num_bytes]  # one of its own, that keeps the memory alive
            buffer.given, buffer.num_idle = weakref.ref(storage), -1
            return torch.empty(0, dtype=dtype, device="cpu").set_(storage)

    def end_backward(self) -> None:
        """Free memory that the last backwards did not need, such as that of a first one in another dtype."""
        for buffer in self._buffers:
            buffer.num_idle = buffer.num_idle + 1 if buffer.is_free else 0
        self._buffers = [buffer for buffer in self._buffers if buffer.num_idle < _MOST_IDLE]

    def close(self) -> None:
        """Free the memory; what is given out, when no tensor uses it any more."""
        self._buffers = []


PART_ELEMENTS = 2**19  # split or joined at once, so that temporary results stay in the caches
_HALF = 0x8000

Part = tuple[int, int]
OddWeights = tuple[Tensor | None, Tensor]
"""Weights of a part that sixteen bits do not tell apart: which (``None``: all), and their upper halves."""
_NOTHING: OddWeights = torch.empty(0, dtype=torch.int32), torch.empty(0, dtype=torch.int16)


class SplitWeights:
    """Float32 tensors of these ``sizes`` as bf16 weights and a 16-bit remainder: 4 bytes each, bit-exact.

    The bf16 weight is the nearest one, halves to even, as in any conversion: 65537 float32 numbers round to each even
    one, and sixteen bits distinguish 65536. The one too many, about one weight of 131072, is in a list. ``upper`` is
    the flat bf16 tensor that is sent to the device, to be read only; ``parts`` are the ranges of each tensor that are
    read and written at once, counted over all of them. An empty tensor has one.
    """

    def __init__(self, sizes: Sequence[int], *, pin_memory: bool) -> None:
        numel = sum(sizes)
        self.upper = make_host_tensor(numel, torch.bfloat16, pin_memory=pin_memory)
        self._lower = make_host_tensor(numel, torch.int16, pin_memory=False)
        self._exceptions: dict[int, OddWeights] = {}  # by part
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        self.parts = [list(cut_parts(start, start + size)) for start, size in zip(starts, sizes, strict=True)]

    @property
    def nbytes(self) -> int:
        """Memory of everything."""
        lists = [tensor for pair in self._exceptions.values() for tensor in pair if tensor is not None]
        return sum(tensor.nbytes for tensor in (self.upper, self._lower, *lists))

    def write_all(self, numbers: Tensor) -> None:
        """Set all weights from a flat tensor."""
        for start, stop in self._parts_to_do(numbers):
            self.write((start, stop), numbers[start:stop])

    def read_all(self) -> Tensor:
        """Return all weights, flat, in new memory."""
        numbers = torch.empty(self.upper.numel(), dtype=torch.float32, device="cpu")
        for start, stop in self._parts_to_do(numbers):
            self.read((start, stop), numbers[start:stop])
        return numbers

    def _parts_to_do(self, numbers: Tensor) -> list[Part]:
        parts = [part for parts in self.parts for part in parts]
        if isinstance(numbers, FakeTensor):  # nothing is computed, and no part takes more memory than the largest
            return [max(parts, key=lambda part: part[1] - part[0])] if parts else []
        return parts

    def read(self, part: Part, numbers: Tensor | None = None) -> Tensor:
        """Return the weights of one part, flat, in ``numbers`` or new memory."""
        if numbers is None:
            numbers = torch.empty(part[1] - part[0], dtype=torch.float32, device="cpu")
        lower = self._lower[slice(*part)]
        bits = numbers.copy_(self.upper[slice(*part)]).view(torch.int32)
        bits.add_(lower)
        if part[0] in self._exceptions and numbers.numel():
            places, halves = self._exceptions[part[0]]
            chosen = slice(None) if places is None else places.long()
            bits[chosen] = halves.int().bitwise_left_shift_(16).bitwise_or_(lower[chosen].int().bitwise_and_(0xFFFF))
        return numbers

    def write(self, part: Part, numbers: Tensor) -> None:
        """Set the weights of one part from a flat tensor."""
        bits, upper = numbers.view(torch.int32), self.upper[slice(*part)]
        upper.copy_(numbers)
        self._lower[slice(*part)].copy_(bits)  # a narrowing copy keeps the lower half: what is lacking in 16 bits
        self._exceptions.pop(part[0], None)
        if isinstance(numbers, FakeTensor) or not numbers.numel():
            return
        lacking = torch.sub(bits, upper.float().view(torch.int32))
        places = lacking.add_(_HALF).bitwise_right_shift_(16).nonzero().view(-1)  # where it is more than sixteen bits
        if 3 * places.numel() > numbers.numel():  # then all halves are shorter than the list
            self._exceptions[part[0]] = None, bits.bitwise_right_shift(16).to(torch.int16)
        elif places.numel():
            self._exceptions[part[0]] = places.int(), bits[places].bitwise_right_shift_(16).to(torch.int16)

    def pieces(self, part: Part) -> tuple[Tensor, Tensor, OddWeights]:
        """Return the memory of one part, to be written to: bf16 weights, remainders, and :data:`Odd`."""
        return self.upper[slice(*part)], self._lower[slice(*part)], self._exceptions.get(part[0], _NOTHING)

    def note_odd(self, part: Part, places: Tensor, halves: Tensor) -> None:
        """Set the odd weights of a part whose :meth:`pieces` were written."""
        self._exceptions.pop(part[0], None)
        if places.numel():
            self._exceptions[part[0]] = places, halves
        if 3 * places.numel() > part[1] - part[0]:
            self.write(part, self.read(part))


def cut_parts(start: int, stop: int, most: int | None = None) -> Iterator[Part]:
    """Cut a tensor into parts. Kernels round the end of a vector differently from its middle: few bits before it."""
    if start == stop:
        yield start, stop
    most = PART_ELEMENTS if most is None else most
    for first in range(start, stop, most):
        yield first, min(first + most, stop)
