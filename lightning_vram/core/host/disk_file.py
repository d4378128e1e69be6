"""Offloaded tensors on disk, for hosts that are short of memory: an unnamed file, and one thread for it."""

import ctypes
import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from torch import Tensor

from lightning_vram.core.host.arena import OffloadError
from lightning_vram.memory.units import MIB, format_bytes

PAGE_BYTES = 4096
_MIN_DIRECT_BYTES = MIB


class DiskFile:
    """An empty file in ``folder``, as long as this object is not closed; it vanishes with the process, killed or not.

    ``folder`` must be on a fast local disk: an NVMe drive, not a network file system. ``argument`` is its name in
    messages. If ``is_direct``, long runs bypass the page cache where the system can do that: it takes a third of the
    processor time, keeps up the rate of the disk, and leaves the cache to others. Memory and file must begin at the
    same byte of a page. The ends of runs and short ones go through the cache. Linux keeps both, and tensors over a
    mapping of the file, consistent as long as they are not used at the same time.
    """

    def __init__(self, folder: str | os.PathLike[str], argument: str, *, is_direct: bool = False) -> None:
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
        self._mappings: list[mmap.mmap] = []  # one for each size that was mapped: tensors are over all of them
        self._direct = _open_direct(self._file.fileno()) if is_direct else None
        self._is_direct = self._direct is not None

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

    def mapped(self) -> mmap.mmap:
        """Return the whole file as memory: pages of the file, which the system takes back when it needs them."""
        if not self._mappings or len(self._mappings[-1]) < self.num_bytes:
            self._mappings.append(mmap.mmap(self._file.fileno(), self.num_bytes))
            if hasattr(mmap, "MADV_SEQUENTIAL"):  # checkpoints go through it from end to end: twice as fast
                self._mappings[-1].madvise(mmap.MADV_SEQUENTIAL)
        return self._mappings[-1]

    def release(self) -> None:
        """Give back the pages that were read through the mapping. What was written to them stays."""
        for mapping in self._mappings if hasattr(mmap, "MADV_DONTNEED") else ():
            mapping.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Close the file; tensors over it keep it alive."""
        self._mappings = []
        direct, self._direct = self._direct, None
        if direct is not None:
            os.close(direct)
        self._file.close()

    def _move(self, call: Callable[[int, list[memoryview], int], int], buffer: memoryview, position: int) -> None:
        is_long = len(buffer) >= _MIN_DIRECT_BYTES
        while buffer:
            file, length = self._choose(position, len(buffer)) if is_long else (self._file.fileno(), len(buffer))
            try:
                moved = call(file, [buffer[:length]], position)
            except OSError as error:
                if file != self._direct or error.errno != errno.EINVAL:
                    raise
                self._is_direct = False  # the file system says so only now
                continue
            if moved == 0:
                raise OSError(f"cannot read or write at byte {position}")
            buffer, position = buffer[moved:], position + moved

    def _choose(self, position: int, length: int) -> tuple[int, int]:
        """Return which file to use, and for how many bytes: only whole pages bypass the cache."""
        if not self._is_direct or self._direct is None:
            return self._file.fileno(), length
        if position % PAGE_BYTES == 0 and length >= PAGE_BYTES:
            return self._direct, length // PAGE_BYTES * PAGE_BYTES
        return self._file.fileno(), min(length, PAGE_BYTES - position % PAGE_BYTES)


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


def _open_direct(file: int) -> int | None:
    """Open the same file once more, bypassing the page cache; ``None`` where that is not possible."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
