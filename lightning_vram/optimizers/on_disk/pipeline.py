"""Chunks go from disk through a ring of buffers and back: while one is stepped, others are read and written."""

import mmap
from collections import deque
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor

from lightning_vram.core.host.arena import OffloadError
from lightning_vram.core.host.disk_file import DiskFile, bytes_of
from lightning_vram.optimizers.on_disk.chunks import Chunk, Extent
from lightning_vram.private_names.torch.dispatch import without_dispatch


class DiskPipeline:
    """A ring of at least two buffers, and the threads that fill and empty it: all memory that this takes.

    A buffer belongs to one at a time: a thread that reads, the caller who steps, a thread that writes and then reads.
    """

    def __init__(self, file: DiskFile, num_buffers: int, num_threads: int) -> None:
        self._file = file
        self._buffer_bytes = 0
        self._num_buffers = num_buffers
        self._buffers: list[Tensor] = []
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="lightning_vram nvme_path")

    def make_room(self, buffer_bytes: int) -> None:
        """Set the size of the buffers."""
        if buffer_bytes > self._buffer_bytes:
            self._buffer_bytes, self._buffers = buffer_bytes, []

    @property
    def ring_bytes(self) -> int:
        """Host memory of the ring. A first step also creates the states of one chunk at a time."""
        return len(self._buffers) * self._buffer_bytes

    def run(self, chunks: Sequence[Chunk], known: Container[int], step: Callable[[Chunk, Tensor], None]) -> None:
        """Call ``step`` with each chunk and its buffer, in order, in this thread; read only ``known`` parameters."""
        while len(self._buffers) < min(self._num_buffers, len(chunks)):
            self._buffers.append(_make_buffer(self._buffer_bytes))
        reads = [chunk.extents if any(span.index in known for span in chunk.spans) else [] for chunk in chunks]
        ring = self._buffers[: len(chunks)]
        turns = deque(self._submit(buffer, [], read) for buffer, read in zip(ring, reads, strict=False))
        try:
            for number, chunk in enumerate(chunks):
                buffer, following = ring[number % len(ring)], number + len(ring)
                self._await(turns.popleft())
                step(chunk, buffer)
                turns.append(self._submit(buffer, chunk.extents, reads[following] if following < len(reads) else []))
            while turns:
                self._await(turns.popleft())
        except BaseException:
            wait(turns)  # or they would use buffers and file later
            for turn in turns:
                self._await(turn)  # the error of a disk is more important
            raise

    def close(self) -> None:
        """End the threads without waiting: this is a finalizer (see ``HostWorker.stop``)."""
        self._threads.shutdown(wait=False)
        self._buffers.clear()

    def _submit(self, buffer: Tensor, written: Sequence[Extent], read: Sequence[Extent]) -> "Future[None]":
        """Write a buffer, and read the next chunk into it, in a thread."""
        return self._threads.submit(_move, self._file, buffer, written, read)

    def _await(self, turn: "Future[None]") -> None:
        try:
            turn.result()
        except Exception as error:
            raise OffloadError(
                f"{self._file.name}: optimizer state could not be written or read ({error}). It is lost: "
                "resume from a checkpoint, with nvme_path on another disk or without it."
            ) from error


def _move(file: DiskFile, buffer: Tensor, written: Sequence[Extent], read: Sequence[Extent]) -> None:
    for extent in written:
        file.write(bytes_of(buffer, extent.offset, extent.length), extent.position)
    for extent in read:
        file.read(bytes_of(buffer, extent.offset, extent.length), extent.position)


def _make_buffer(num_bytes: int) -> Tensor:
    """Return page-aligned memory."""
    memory = mmap.mmap(-1, max(num_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_DONTFORK"):
        # If a process forks during direct I/O, as for a data loader, only the child might get the bytes.
        memory.madvise(mmap.MADV_DONTFORK)
    with without_dispatch():
        return torch.frombuffer(memory, dtype=torch.uint8)
