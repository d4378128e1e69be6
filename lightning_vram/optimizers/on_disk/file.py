"""A file without a name for optimizer states: all its space is there from the start, and it vanishes with the process.

Long runs of bytes go past the page cache where the system can do that: it takes a third of the processor time, keeps
up the rate of the disk, and leaves the cache to others. The ends of runs and short ones go through the cache. Linux
keeps both, and tensors over a mapping of the file, in agreement as long as they are not used at the same time.
"""

import errno
import mmap
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, cast

from lightning_vram.core.host.errors import OffloadError
from lightning_vram.memory.units import MIB, format_bytes

PAGE_BYTES = 4096
_MIN_DIRECT_BYTES = MIB


class DiskFile:
    """A file in ``folder``, which exists as long as this object is not closed.

    Args:
        folder: On a local disk that is fast.
        num_bytes: Its size.

    Raises:
        ValueError: If ``folder`` is no folder.
        OffloadError: If no file can be made there, or the disk is too small for it.
    """

    def __init__(self, folder: str | os.PathLike[str], num_bytes: int) -> None:
        self.folder = str(folder)
        self._num_bytes = max(num_bytes, 1)  # an empty file cannot be mapped
        if not Path(folder).is_dir():
            raise ValueError(f"nvme_path must be a folder that exists, got {self.folder!r}.")
        if not hasattr(os, "preadv"):
            raise OffloadError("nvme_path needs a system with preadv and pwritev: Linux or macOS. Leave it out.")
        try:
            self._file = cast(BinaryIO, tempfile.TemporaryFile(dir=folder, buffering=0))  # noqa: SIM115 - close()
        except OSError as error:
            raise OffloadError(
                f"nvme_path={self.folder!r}: no file can be made there ({error}). Name a folder that can be written to."
            ) from error
        try:
            self._reserve()
        except BaseException:
            self._file.close()
            raise
        self._mapping: mmap.mmap | None = None
        self._direct = _open_direct(self._file.fileno())
        self._is_direct = self._direct is not None

    def read(self, buffer: memoryview, position: int) -> None:
        """Fill ``buffer``, whose address is ``position`` up to whole pages, with the bytes at ``position``."""
        self._move(os.preadv, buffer, position)

    def write(self, buffer: memoryview, position: int) -> None:
        """Write ``buffer``, whose address is ``position`` up to whole pages, to ``position``."""
        self._move(os.pwritev, buffer, position)

    def mapped(self) -> mmap.mmap:
        """Return the whole file as memory: pages of the file, which the system takes back when it needs them."""
        if self._mapping is None:
            self._mapping = mmap.mmap(self._file.fileno(), self._num_bytes)
            if hasattr(mmap, "MADV_SEQUENTIAL"):  # checkpoints go through it from end to end: twice as fast
                self._mapping.madvise(mmap.MADV_SEQUENTIAL)
        return self._mapping

    def release(self) -> None:
        """Give back the pages that were looked at through the mapping. What was written to them stays."""
        if self._mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Let go of the file; tensors over it keep it alive."""
        self._mapping = None
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
                raise OSError(f"nothing can be read or written at byte {position}")
            buffer, position = buffer[moved:], position + moved

    def _choose(self, position: int, length: int) -> tuple[int, int]:
        """Return which file to use, and for how many bytes: past the cache go whole pages."""
        if not self._is_direct or self._direct is None:
            return self._file.fileno(), length
        if position % PAGE_BYTES == 0 and length >= PAGE_BYTES:
            return self._direct, length // PAGE_BYTES * PAGE_BYTES
        return self._file.fileno(), min(length, PAGE_BYTES - position % PAGE_BYTES)

    def _reserve(self) -> None:
        free = shutil.disk_usage(self.folder).free
        error = _reserve(self._file.fileno(), self._num_bytes) if self._num_bytes <= free else None
        if self._num_bytes > free or error is not None:
            raise OffloadError(
                f"nvme_path={self.folder!r} needs {format_bytes(self._num_bytes)} for the states of the optimizer, but "
                f"{format_bytes(free)} are free there. Free some, name a folder on another disk, or leave nvme_path "
                "out."
            ) from error


def _reserve(file: int, num_bytes: int) -> OSError | None:
    """Reserve file space; return why there is none. A file system that cannot reserve is believed to have it."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file, 0, num_bytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            return error
    if os.fstat(file).st_size < num_bytes:
        os.ftruncate(file, num_bytes)
    return None


def _open_direct(file: int) -> int | None:
    """Open the same file once more, past the page cache; ``None`` where that is not possible."""
    if not hasattr(os, "O_DIRECT"):
        return None
    try:
        return os.open(f"/proc/self/fd/{file}", os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return None
