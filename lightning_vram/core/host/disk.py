"""Offloaded tensors on disk, for hosts that are short of memory: an unnamed file, and one thread for it."""

import ctypes
import errno
import mmap
import os
import queue
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.core.host.memory import Block, ChunkedSpace, OffloadError, hidden_from_modes, make_host_bytes
from lightning_vram.core.host.transfers import PATIENCE_SECONDS, Copies, H2DCopy, HostWorker, Ticket
from lightning_vram.memory.units import MIB, format_bytes
from lightning_vram.private_names.dispatcher import without_dispatch


class DiskFile:
    """An empty file in ``folder``, as long as this object is not closed; it vanishes with the process, killed or not.

    ``argument`` is the name of ``folder`` in messages. Linux keeps the file, and tensors over a mapping of it,
    consistent if they are not used at the same time.
    """

    def __init__(self, folder: str | os.PathLike[str], argument: str) -> None:
        self.name = f"{argument}={str(folder)!r}"
        self.num_bytes = 0
        self._folder = folder
        if not Path(folder).is_dir():
            raise ValueError(f"{argument} must be an existing folder, got {str(folder)!r}.")
        if not hasattr(os, "preadv"):
            raise OffloadError(f"{argument} needs a system with preadv and pwritev: Linux or macOS. Leave it out.")
        try:
            self._file = cast(BinaryIO, tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115 - close()
        except OSError as error:
            raise OffloadError(f"{self.name}: cannot create a file there ({error}). Name a writable folder.") from error

    def grow(self, num_bytes: int, purpose: str, way_out: str) -> None:
        """Reserve space at the end: a full disk raises here, with the file unchanged, not in the middle of a step."""
        free = shutil.disk_usage(self._folder).free
        error = _reserve(self._file.fileno(), self.num_bytes, num_bytes) if num_bytes <= free else None
        if num_bytes > free or error is not None:
            raise OffloadError(
                f"{self.name} needs {format_bytes(num_bytes)} {purpose}, but {format_bytes(free)} are free. Free some "
                f"space, name a folder on another disk, {way_out}."
            ) from error
        self.num_bytes += num_bytes

    def read(self, buffer: memoryview, position: int) -> None:
        """Fill ``buffer`` with the bytes at ``position``."""
        self._move(os.preadv, buffer, position)

    def write(self, buffer: memoryview, position: int) -> None:
        """Write ``buffer`` to ``position``."""
        self._move(os.pwritev, buffer, position)

    def map(self) -> mmap.mmap:
        """Return the whole file as memory: pages of the file, which the system takes back when it needs them."""
        return mmap.mmap(self._file.fileno(), self.num_bytes)

    def close(self) -> None:
        """Close the file; tensors over it keep it alive."""
        self._file.close()

    def _move(self, call: Callable[[int, list[memoryview], int], int], buffer: memoryview, position: int) -> None:
        file, start, length = self._file.fileno(), position, len(buffer)
        while buffer:
            moved = call(file, [buffer], position)
            if moved == 0:
                raise OSError(f"cannot read or write at byte {position}")
            buffer, position = buffer[moved:], position + moved
        if hasattr(os, "posix_fadvise"):  # else it would fill the host's memory by another name, the page cache
            os.posix_fadvise(file, start, length, os.POSIX_FADV_DONTNEED)


def bytes_of(buffer: Tensor, start: int, length: int) -> memoryview:
    """Return bytes of a flat tensor of bytes, without NumPy."""
    return memoryview((ctypes.c_char * length).from_address(buffer.data_ptr() + start)).cast("B")


def _reserve(file: int, start: int, length: int) -> OSError | None:
    """Reserve file space; return the error if there is none. A file system that cannot reserve should have it."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, start, length)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return error
    if os.fstat(file).st_size < start + length:
        os.ftruncate(file, start + length)
    return None


class DiskWorker(HostWorker):
    """The thread, which closes the file when it ends: one closed under a write may have become another file."""

    def __init__(self, file: DiskFile) -> None:
        self._file = file
        super().__init__("lightning_vram disk_path", 1, on_end=file.close)

    def check(self) -> None:
        """Raise what went wrong in the thread."""
        if self._errors:
            raise OffloadError(
                f"{self._file.name}: offloaded activations could not be written or read ({self._errors[0]}). "
                "This step and all further steps of the run fail; name a folder on another disk."
            ) from self._errors[0]

    def check_alive(self) -> None:
        """Raise what went wrong in the thread, or that it is gone."""
        self.check()
        if not self._end.alive or not self._thread.is_alive():
            raise OffloadError(f"{self._file.name}: already closed; the offloaded activations are gone.")


STAGING_BYTES = 8 * MIB  # of one buffer
NUM_STAGING_BUFFERS = 4  # on the way out; there is one more for the way back


class DiskRing(ChunkedSpace[range]):
    """Bytes in a file without a name in ``folder``, which pass through a few staging buffers, until :meth:`close`."""

    def __init__(self, folder: str | os.PathLike[str], *, pin_memory: bool, staging_bytes: int = STAGING_BYTES) -> None:
        super().__init__()
        self._file = DiskFile(folder, "disk_path")
        self._staging_bytes = staging_bytes
        self._buffers: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        with without_dispatch():  # they do not count as memory of the device
            for _ in range(NUM_STAGING_BUFFERS):
                self._buffers.put(make_host_bytes(staging_bytes, pin_memory=pin_memory))
            self._read_buffer = make_host_bytes(staging_bytes, pin_memory=pin_memory)
        self._copies: dict[Callable[[], Copies], Copies] = {}  # of the thread: others' are not thread-safe
        self._worker = DiskWorker(self._file)  # whose thread ends with it, so jobs must not hold the ring

    @property
    def staging_bytes(self) -> int:
        """Host memory taken."""
        return (NUM_STAGING_BUFFERS + 1) * self._staging_bytes

    def write(self, source: Tensor, copies: Copies, window_bytes: int) -> "DiskBlock":
        """Write flat bytes; return when the last are in flight; ``OffloadError`` if the disk is full."""
        self._worker.check_alive()
        block, parts = self.take(source.numel()), []
        for piece in block.pieces:
            parts += [piece[at : at + self._staging_bytes] for at in range(0, len(piece), self._staging_bytes)]
        start = 0
        for part in parts:
            with hidden_from_modes(source):
                values = source.narrow(0, start, len(part))
            self._write_part(values, part.start, copies, window_bytes)
            start += len(part)
        return DiskBlock(self, block, parts)

    def close(self) -> None:
        """End the thread after its jobs, and give the file back."""
        self._worker.stop()

    def _write_part(self, source: Tensor, position: int, copies: Copies, window_bytes: int) -> None:
        length, buffer, buffers, file = source.numel(), self._borrow_buffer(), self._buffers, self._file
        try:
            departure = copies.send(source, [buffer.narrow(0, 0, length)], window_bytes)

            def write() -> None:
                try:
                    departure.wait()
                    file.write(bytes_of(buffer, 0, length), position)
                finally:
                    buffers.put(buffer)

            self._worker.submit(write)
        except BaseException:
            buffers.put(buffer)
            raise

    def _borrow_buffer(self) -> Tensor:
        while True:
            self._worker.check_alive()
            with suppress(queue.Empty):
                return self._buffers.get(timeout=PATIENCE_SECONDS)

    @override
    def _cut(self, space: range, start: int, num_bytes: int) -> range:
        return space[start : start + num_bytes]

    @override
    def _make_chunks(self, sizes: list[int]) -> list[range]:
        end = self._file.num_bytes
        way_out = 'set compress="bf16", or use a smaller batch'
        self._file.grow(sum(sizes), f"in addition to {format_bytes(end)}", way_out)
        return [range(start, start + size) for start, size in zip(accumulate(sizes, initial=end), sizes, strict=False)]


@dataclass(slots=True, eq=False)
class DiskBlock:
    """Bytes on disk, as long as this object lives."""

    _ring: DiskRing
    _block: Block[range]
    _parts: list[range]  # that fit into a staging buffer

    def read(self, target: Tensor, make_copies: Callable[[], Copies], moment: Any) -> H2DCopy:
        """Begin to read into ``target``, which was made before ``moment``; ``OffloadError`` after an error."""
        ring, parts = self._ring, self._parts
        file, buffer, known = ring._file, ring._read_buffer, ring._copies
        copied: list[H2DCopy] = []

        @torch.no_grad()
        def read() -> None:  # must not hold this object
            if make_copies not in known:
                known[make_copies] = make_copies()
            copies, start = known[make_copies], 0
            for part in parts:
                file.read(bytes_of(buffer, 0, len(part)), part.start)
                copied[:] = [copies.fetch([buffer[: len(part)]], target.narrow(0, start, len(part)), moment)]
                copied[0].finish()
                start += len(part)
            copies.settle()  # else they would hold the target until they are asked for the next

        ring._worker.check_alive()
        return _DiskH2DCopy(ring._worker.submit(read), copied)


@dataclass(eq=False)
class _DiskH2DCopy(H2DCopy):
    _ticket: Ticket
    _copied: list[H2DCopy]  # the last part, once that is on its way

    def wait(self, target: Tensor) -> None:
        self._ticket.wait()
        for part in self._copied:
            part.wait(target)
