"""Host memory for offloaded tensors."""

import mmap
import os
import sys
import warnings
import weakref
from contextlib import AbstractContextManager, nullcontext, suppress

import torch
from torch import Tensor

from lightning_vram.core.host.chunked_space import Block, ChunkedSpace
from lightning_vram.memory.device.accelerators import can_pin_in_place, pin_in_place
from lightning_vram.memory.host.available import available_host_bytes
from lightning_vram.memory.units import GIB, format_bytes
from lightning_vram.private_names.torch.dispatch import FakeTensor, detect_fake_mode, without_dispatch, without_modes
from lightning_vram.private_names.torch.tensors import free_pinned_memory

MARGIN_BYTES = GIB  # left to everything else on the host

_warned: list[int] = []  # bytes of the warning of this process
_never_unmapped: list[mmap.mmap] = []


class OffloadError(RuntimeError):
    """The host or the disk is too small, or fails."""


class HostBlock:
    """Memory for one tensor, as long as this object lives: ``pieces`` are flat tensors of bytes, in order."""

    __slots__ = ("_block", "pieces")

    def __init__(self, block: Block[Tensor]) -> None:
        self._block = block
        with unseen(block.pieces[0].payload):
            self.pieces = [
                piece.payload.narrow(0, piece.start, piece.num_bytes) if piece.num_bytes < piece.payload.numel()
                else piece.payload
                for piece in block.pieces
            ]  # fmt: skip


class HostArena:
    """Host memory, pinned (needs an accelerator) or not; copies overlap with computation only if it is pinned.

    Pinning is slow and pinned memory is lost to everything else, so memory is taken only when needed, and given back
    only by :meth:`close`. PyTorch's allocator of pinned memory rounds up to powers of two, which is the size of the
    chunks. A host that is too small is refused with an error: pinned memory cannot be swapped, the kernel would kill
    the process. ``like`` is a fake tensor from which to make fake memory, of which there is enough.
    """

    def __init__(self, *, pin_memory: bool, like: Tensor | None = None) -> None:
        self._pin_memory = pin_memory
        self._like = like
        self._space: ChunkedSpace[Tensor] = ChunkedSpace()

    @property
    def total_bytes(self) -> int:
        """Bytes taken from the host."""
        return self._space.total_bytes

    @property
    def num_blocks(self) -> int:
        """Number of tensors in it."""
        return self._space.num_blocks

    def take(self, num_bytes: int) -> HostBlock:
        """Return memory for ``num_bytes``; ``OffloadError`` if the host has not enough, and nothing is taken then."""
        return HostBlock(self._space.take(num_bytes, self._make_chunks))

    def close(self) -> None:
        """Give all memory back. A tensor that is still in it stays readable, and keeps its chunk."""
        self._space = ChunkedSpace()
        if self._pin_memory and self._like is None:
            free_pinned_memory()  # else PyTorch keeps it, pinned, for itself

    def _make_chunks(self, sizes: list[int]) -> list[Tensor]:
        if self._like is not None:
            with unseen(self._like) if self._like.is_cpu else nullcontext():  # who counts on a card counts this, too
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


def make_host_bytes(num_bytes: int, *, pin_memory: bool) -> Tensor:
    """Return a flat tensor of bytes on the host."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin_memory)


def make_host_tensor(numel: int, dtype: torch.dtype, *, pin_memory: bool) -> Tensor:
    """Return an uninitialised flat tensor on the host, for as long as training takes.

    PyTorch rounds up what it pins to powers of two, up to twice as much (1.78 times measured on a model's parameters),
    and keeps it. So memory on pages of its own is taken and registered with CUDA. If CUDA refuses, it stays unpinned,
    with one warning per process. As with PyTorch's pinned memory, a forked process cannot read it.
    """
    if not pin_memory or not numel:
        return torch.empty(numel, dtype=dtype, device="cpu")
    tensor = _empty_on_own_pages(numel, dtype)
    if pin_in_place(tensor):
        return tensor
    if not can_pin_in_place(tensor):
        return tensor.pin_memory()
    _warn_unpinned(tensor.nbytes)
    return tensor


def _empty_on_own_pages(numel: int, dtype: torch.dtype) -> Tensor:
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


def _warn_unpinned(num_bytes: int) -> None:
    if _warned:
        return
    _warned.append(num_bytes)
    warnings.warn(
        f"CUDA could not pin {format_bytes(num_bytes)} of host memory (cudaHostRegister): it stays unpinned, so "
        "its copies do not overlap with computation. Later allocations may stay unpinned, too.",
        stacklevel=2,
    )


def unseen(tensor: Tensor) -> AbstractContextManager[object]:
    """Return a context in which no dispatch mode sees what is done to ``tensor``, except the mode of fake tensors."""
    return without_modes() if isinstance(tensor, FakeTensor) else without_dispatch()
