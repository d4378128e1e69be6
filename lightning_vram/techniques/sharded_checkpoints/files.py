"""Files of a checkpoint: complete or absent, with checksums, and with clear errors.

New content is written under a hidden name, then renamed in one step. A file replaces a file atomically everywhere; a
folder only where the system can exchange two names (Linux, most local file systems). Elsewhere that takes two renames,
and :func:`recover` undoes the first if the process was killed between them. The old content is deleted afterwards, so
the disk briefly holds both.
"""

import contextlib
import ctypes
import hashlib
import io
import json
import os
import pickle
import re
import shutil
import zipfile
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_vram.core.ranks import CheckpointError

_AT_FDCWD = -100  # of Linux's fcntl.h: paths are relative to the working directory
_RENAME_EXCHANGE = 2


def temporary_path(path: Path) -> Path:
    """Name the hidden path next to a checkpoint for its next content: the same on every rank."""
    return _hidden(path, "new")


def publish(temporary: Path, path: Path) -> None:
    """Rename ``temporary`` to ``path``, synced, and delete the old content; on ``OSError``, ``path`` is unchanged."""
    for written in (*temporary.rglob("*"), temporary):
        _sync(written)
    is_folder = path.is_dir() and not path.is_symlink()
    if not os.path.lexists(path) or not (is_folder or temporary.is_dir()):
        os.replace(temporary, path)
        _sync(path.parent)
        return
    if _exchange(temporary, path):
        old = temporary
    else:
        old = _hidden(path, "old")
        delete(old)
        os.rename(path, old)
        os.rename(temporary, path)
    _sync(path.parent)
    delete(old)


def recover(path: Path) -> None:
    """Put the old checkpoint back if the process was killed between the two renames of :func:`publish`."""
    old = _hidden(path, "old")
    if not os.path.lexists(path) and os.path.lexists(old):
        os.rename(old, path)


def delete_leftovers(path: Path) -> None:
    """Recover, then delete the hidden files that killed processes have left next to a checkpoint."""
    recover(path)
    delete(temporary_path(path))
    delete(_hidden(path, "old"))


def remove(path: Path) -> None:
    """Delete a checkpoint, if it exists; never leave half of it under its name."""
    delete_leftovers(path)
    if os.path.lexists(path):
        os.rename(path, temporary_path(path))
        delete(temporary_path(path))


def delete(path: Path) -> None:
    """Delete a file, link or folder, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _hidden(path: Path, purpose: str) -> Path:
    # without the name itself: Lightning resumes from any file whose name contains "hpc_ckpt_"
    digest = hashlib.sha256(path.name.encode()).hexdigest()[:16]
    return path.with_name(f".{digest}.{purpose}")


def _sync(path: Path) -> None:
    # not possible for folders on Windows and some network file systems
    with contextlib.suppress(OSError) if path.is_dir() else contextlib.nullcontext():
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; ``False`` where the system cannot."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    if renameat2 is None:
        return False
    names = [ctypes.c_char_p(os.fsencode(path)) for path in (one, other)]
    return int(renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_RENAME_EXCHANGE))) == 0


# Sharded checkpoints have a file of CRC-32 checksums, computed during the write (0.3 s per GiB); full ones have
# those of their zip archive. They detect bytes changed by a disk or a copy, not on purpose.
CHECKSUM_FILE = "checksums.json"
_CHUNK_BYTES = 2**23
_WAY_OUT = "Resume from another checkpoint, or load this one without the check: verify=False."


def check_folder(folder: Path, part: int = 0, num_parts: int = 1) -> None:
    """Raise ``CheckpointError`` if files differ from their checksums, if any; each rank reads one part of the files."""
    if not (folder / CHECKSUM_FILE).is_file():
        return
    try:
        entries = json.loads((folder / CHECKSUM_FILE).read_text(encoding="utf-8"))
        written = sorted((-entry["num_bytes"], name, entry["crc32"]) for name, entry in entries.items())
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{CHECKSUM_FILE} is damaged. {_WAY_OUT}") from error
    for negative_bytes, name, crc32 in written[part::num_parts]:  # the largest first
        _check_file(folder / name, -negative_bytes, crc32)


def check_archive(path: Path, part: int = 0, num_parts: int = 1) -> None:
    """Raise ``CheckpointError`` if entries of a ``torch.save`` archive are damaged; a rank reads one part of them."""
    if not is_archive(path):
        return
    try:
        with zipfile.ZipFile(path) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: (-entry.file_size, entry.filename))
            for entry in entries[part::num_parts]:
                with archive.open(entry) as file:
                    while file.read(_CHUNK_BYTES):
                        pass
    except OSError:
        raise
    except Exception as error:  # of zipfile, zlib or struct
        raise CheckpointError(f"{path.name} is damaged ({error}). {_WAY_OUT}") from error


def is_archive(path: Path) -> bool:
    """Whether a file is a zip archive of ``torch.save``, which can be memory-mapped."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


def _check_file(path: Path, num_bytes: int, crc32: int) -> None:
    size, found = path.stat().st_size, 0
    if size != num_bytes:
        raise CheckpointError(f"{path.name} is damaged: it has {size} bytes instead of {num_bytes}. {_WAY_OUT}")
    with path.open("rb", buffering=0) as file:
        while data := file.read(_CHUNK_BYTES):
            found = zlib.crc32(data, found)
    if found != crc32:
        raise CheckpointError(f"{path.name} is damaged: its checksum differs. {_WAY_OUT}")


class _WatchedFile(io.BufferedWriter):
    """Calls ``on_write`` with what was written."""

    on_write: Callable[[Any], None]

    def write(self, data: Any) -> int:
        written = super().write(data)
        self.on_write(data)
        return written


class CheckedFiles(FileSystem):
    """Writes files, and collects the checksum of each complete one, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.checksums: dict[str, dict[str, int]] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.BufferedWriter, None, None]:
        """Create a file; its checksum is complete when it is closed."""
        name = Path(path).name.removesuffix(".tmp")  # which torch then renames ".metadata.tmp" to
        checksum = self.checksums[name] = {"num_bytes": 0, "crc32": 0}

        def on_write(data: Any) -> None:
            checksum["num_bytes"] += memoryview(data).nbytes
            checksum["crc32"] = zlib.crc32(data, checksum["crc32"])

        with _WatchedFile(Path(path).open("wb", 0)) as stream:
            stream.on_write = on_write
            yield stream


class CheckedWriter(FileSystemWriter):
    """Writes one rank's part of a sharded checkpoint into an empty folder; ``files`` has the checksums."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True)
        self.fs = self.files = CheckedFiles()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; raise disk errors themselves: other ranks see the error without its cause."""
        with naming_disk_errors():
            return super().write_data(plan, planner)


def write_file(values: Any, path: Path, on_write: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Replace a file by one of ``torch.save``; ``on_write`` gets the number of bytes so far.

    On error, such as ``OSError`` of a full disk, the file is unchanged.
    """
    temporary = temporary_path(path)
    try:
        with naming_disk_errors(), _WatchedFile(temporary.open("wb", 0)) as file:
            file.on_write = lambda _: on_write(file.tell())
            torch.save(values, file)
        publish(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            delete(temporary)
        raise


@contextmanager
def naming_disk_errors() -> Generator[None, None, None]:
    """Raise the disk's own error; ``torch.save`` reports a broken archive instead."""
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise cause from None


_CLASS = re.compile(r"GLOBAL ([\w.]+)")  # in the message of torch.load(weights_only=True)
_MAX_REASON = 200
# clear by themselves: a missing class, the disk; Ctrl-C is no damage
_CLEAR = (AttributeError, CheckpointError, ImportError, KeyboardInterrupt, MemoryError, OSError)


def read_values(path: Path, *, weights_only: bool | None) -> Any:
    """Read a ``torch.save`` file into host memory, memory-mapped if possible.

    Raises:
        pickle.UnpicklingError: If it has what ``weights_only`` does not allow.
        CheckpointError: If it is damaged, or not a checkpoint.
        OSError: If it cannot be read.
    """
    return explained(
        lambda: torch.load(path, map_location="cpu", mmap=is_archive(path), weights_only=weights_only), path.name
    )


def explained(read: Callable[[], Any], name: str) -> Any:
    """Read, with the errors of :func:`read_values` for ``name``."""
    try:
        return read()
    except (Exception, CheckpointException) as error:
        # torch.distributed.checkpoint collects errors of all ranks
        first = error.failures[min(error.failures)][0] if isinstance(error, CheckpointException) else error
        if isinstance(first, _CLEAR):
            raise first from error
        found = _CLASS.search(str(first)) if isinstance(first, pickle.UnpicklingError) else None
        if found:
            raise pickle.UnpicklingError(
                f"{name} contains {found[1]}, and weights_only=True, the default, loads only tensors and basic types. "
                "If you trust its source: trainer.fit(..., weights_only=False), or allow the class with "
                "torch.serialization.add_safe_globals."
            ) from error
        reason = str(first).rpartition("WeightsUnpickler error:")[2].strip().partition("\n")[0][:_MAX_REASON]
        raise CheckpointError(f"{name} is damaged or not a checkpoint ({type(first).__name__}: {reason})") from error
