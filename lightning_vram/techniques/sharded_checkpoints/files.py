"""Checkpoints that are there whole or not at all: written under a hidden name, then given their own in one step.

A file replaces a file in one step everywhere. A folder takes the place of another in one step where the system can
exchange two names (Linux, most local file systems); elsewhere it takes two renames, and :func:`recover` undoes the
first where a process was killed between them. What was there before is deleted afterwards, so that for a moment both
need room on the disk.
"""

import contextlib
import ctypes
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

_AT_FDCWD = -100  # of Linux's fcntl.h: paths are relative to the working directory
_RENAME_EXCHANGE = 2


def temporary_path(path: Path) -> Path:
    """Name the hidden place beside a checkpoint where its next content is written: the same on every rank, always."""
    return _hidden(path, "new")


def publish(temporary: Path, path: Path) -> None:
    """Give what was written its name; what had it before is deleted. It is on the disk when this returns.

    Args:
        temporary: :func:`temporary_path` of ``path``.
        path: The checkpoint.

    Raises:
        OSError: If the disk fails, or the folder is not writable. ``path`` is what it was.
    """
    for written in _contents(temporary):
        _sync(written)
    takes_a_folders_place = path.is_dir() and not path.is_symlink()
    if not os.path.lexists(path) or not (takes_a_folders_place or temporary.is_dir()):
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
    """Put the old checkpoint back if a process was killed after it was set aside, before the new one had its name."""
    old = _hidden(path, "old")
    if not os.path.lexists(path) and os.path.lexists(old):
        os.rename(old, path)


def delete_leftovers(path: Path) -> None:
    """Delete what processes that were killed have left beside a checkpoint, after :func:`recover`."""
    recover(path)
    delete(temporary_path(path))
    delete(_hidden(path, "old"))


def remove(path: Path) -> None:
    """Delete a checkpoint, if it is there; half of one is never left under its name."""
    delete_leftovers(path)
    if os.path.lexists(path):
        os.rename(path, temporary_path(path))
        delete(temporary_path(path))


def delete(path: Path) -> None:
    """Delete a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _hidden(path: Path, purpose: str) -> Path:
    # without the name itself: Lightning takes each file whose name contains "hpc_ckpt_" for a checkpoint to go on from
    digest = hashlib.sha256(path.name.encode()).hexdigest()[:16]
    return path.with_name(f".{digest}.{purpose}")


def _contents(path: Path) -> Iterator[Path]:
    if path.is_dir():
        for inner in path.iterdir():
            yield from _contents(inner)
    yield path


def _sync(path: Path) -> None:
    try:
        handle = os.open(path, os.O_RDONLY)
    except PermissionError:  # Windows opens no folders
        return
    try:
        with contextlib.nullcontext() if path.is_file() else contextlib.suppress(OSError):
            os.fsync(handle)  # some network file systems cannot do it for folders
    finally:
        os.close(handle)


def _exchange(one: Path, other: Path) -> bool:
    """Swap two names in one step; false where that is not possible."""
    renameat2 = getattr(ctypes.CDLL(None), "renameat2", None) if os.name == "posix" else None
    if renameat2 is None:
        return False
    names = [ctypes.c_char_p(os.fsencode(path)) for path in (one, other)]
    return int(renameat2(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_RENAME_EXCHANGE))) == 0
