"""Offloaded tensors on disk."""

import os
import queue
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor

from lightning_vram.core.host.arena import unseen
from lightning_vram.core.host.chunked_space import Block, ChunkedSpace
from lightning_vram.core.host.disk_file import DiskFile
from lightning_vram.core.host.disk_worker import DiskWorker, make_staging
from lightning_vram.core.host.transfers import Arrival, Copies
from lightning_vram.core.host.worker import PATIENCE_SECONDS, Ticket
from lightning_vram.memory.units import MIB, format_bytes

STAGING_BYTES = 8 * MIB  # of one buffer
NUM_STAGING_BUFFERS = 4  # on the way out; the thread has one more for the way back


class DiskRing:
    """Bytes in a file without a name in ``folder``, as long as this object is not closed.

    Bytes pass through a few staging buffers, the only host memory this takes: a step that saves faster than the disk
    writes waits for it. Space is used again in every step. Jobs run in order, so space is used again only after it was
    read. The thread never waits for the callers, and the next call raises its error.
    """

    def __init__(self, folder: str | os.PathLike[str], *, pin_memory: bool, staging_bytes: int = STAGING_BYTES) -> None:
        self._file = DiskFile(folder, "disk_path")
        self._pin_memory = pin_memory
        self._staging_bytes = staging_bytes
        self._num_buffers = 0
        self._buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        self._space: ChunkedSpace[int] = ChunkedSpace()
        self._worker = DiskWorker(self._file)
        weakref.finalize(self, self._worker.stop, wait=False)

    @property
    def total_bytes(self) -> int:
        """Size of the file."""
        return self._space.total_bytes

    @property
    def staging_bytes(self) -> int:
        """Host memory taken."""
        return (self._num_buffers + (self._worker.staging_buffer is not None)) * self._staging_bytes

    @property
    def num_blocks(self) -> int:
        """Number of tensors in it."""
        return self._space.num_blocks

    def write(self, source: Tensor, copies: Copies, window_bytes: int) -> "DiskBlock":
        """Write flat bytes; return when the last are in flight; ``OffloadError`` if the disk is full."""
        self._worker.check_alive()
        block = self._space.take(source.numel(), self._make_chunks)
        extents, start = [], 0
        for piece in block.pieces:
            for inner in range(0, piece.num_bytes, self._staging_bytes):
                length = min(self._staging_bytes, piece.num_bytes - inner)
                position = piece.payload + piece.start + inner
                with unseen(source):
                    part = source.narrow(0, start, length)
                self._write_part(part, position, copies, window_bytes)
                extents.append((position, length))
                start += length
        return DiskBlock(self, block, extents)

    def close(self) -> None:
        """End the thread after its jobs, and give file and buffers back."""
        self._worker.stop()

    def _write_part(self, source: Tensor, position: int, copies: Copies, window_bytes: int) -> None:
        length, loan = source.numel(), self._borrow_buffer()
        worker = self._worker  # the job must not hold the ring
        try:
            departure = copies.send(source, [loan.buffer.narrow(0, 0, length)], window_bytes)

            def write() -> None:
                try:
                    departure.wait()
                    worker.write(loan.buffer, length, position)
                finally:
                    loan.give_back()

            worker.submit(write)
        except BaseException:
            loan.give_back()
            raise

    def _borrow_buffer(self) -> "_Loan":
        if self._buffers.empty() and self._num_buffers < NUM_STAGING_BUFFERS:
            loan = _Loan(make_staging(self._staging_bytes, pin_memory=self._pin_memory), self._buffers)
            self._num_buffers += 1
            return loan
        while True:
            try:
                loan = _Loan(self._buffers.get(timeout=PATIENCE_SECONDS), self._buffers)
            except queue.Empty:
                self._worker.check_alive()
            else:
                self._worker.check_alive()  # an error: the loan ends with it
                return loan

    def _make_chunks(self, sizes: list[int]) -> list[int]:
        end = self._file.num_bytes
        way_out = 'set compress="bf16", or use a smaller batch'
        self._file.grow(sum(sizes), f"in addition to {format_bytes(end)}", way_out)
        return [end + sum(sizes[:index]) for index in range(len(sizes))]


class DiskBlock:
    """Bytes on disk, as long as this object lives."""

    __slots__ = ("_block", "_extents", "_ring")

    def __init__(self, ring: DiskRing, block: Block[int], extents: list[tuple[int, int]]) -> None:
        self._ring = ring
        self._block = block
        self._extents = extents

    def read(self, target: Tensor, make_copies: Callable[[], Copies], moment: Any) -> Arrival:
        """Begin to read into ``target``, which was made before ``moment``; ``OffloadError`` after an error."""
        worker, extents = self._ring._worker, self._extents  # the job must hold neither the ring nor this object
        size, pin_memory = self._ring._staging_bytes, self._ring._pin_memory
        copied: list[Arrival] = []

        def read() -> None:
            copies, buffer = worker.copies(make_copies), worker.buffer(size, pin_memory=pin_memory)
            start = 0
            for position, length in extents:
                worker.read(buffer, length, position)
                copied[:] = [copies.fetch([buffer[:length]], target.narrow(0, start, length), moment)]
                copied[0].finish()
                start += length
            copies.settle()  # else they would hold the target until they are asked for the next

        return _DiskArrival(worker.submit(read), copied)


class _Loan:
    """A staging buffer that is returned once: when it is written, or never will be."""

    def __init__(self, buffer: Tensor, buffers: "queue.SimpleQueue[Tensor]") -> None:
        self.buffer = buffer
        self._buffers: queue.SimpleQueue[Tensor] | None = buffers

    def __del__(self) -> None:
        self.give_back()

    def give_back(self) -> None:
        buffers, self._buffers = self._buffers, None
        if buffers is not None:
            buffers.put(self.buffer)


class _DiskArrival(Arrival):
    def __init__(self, ticket: Ticket, copied: list[Arrival]) -> None:
        self._ticket = ticket
        self._copied = copied  # the last part, once that is on its way

    def wait(self, target: Tensor) -> None:
        self._ticket.wait()
        for part in self._copied:
            part.wait(target)
