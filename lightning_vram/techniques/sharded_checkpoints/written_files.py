"""The files of a checkpoint as they are written: their checksums, and the error of the disk where torch hides it."""

import errno
import io
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from lightning_vram.core.processes.rank_errors import CheckpointError
from lightning_vram.memory.units import format_bytes
from lightning_vram.techniques.sharded_checkpoints.checksums import Checksum

Result = TypeVar("Result")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class CheckedFiles(FileSystem):
    """Notes the checksum of each file that is written.

    Attributes:
        checksums: By name, of those that are complete.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checksums: dict[str, Checksum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        """Open a file; its checksum is there when it was closed."""
        with super().create_stream(path, mode) as stream:
            if "w" not in mode:
                yield stream
                return
            checked = _CheckedStream(stream)
            yield checked
            self.checksums[Path(path).name] = checked.checksum

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file, and what is noted of it."""
        super().rename(path, new_path)
        self.checksums[Path(new_path).name] = self.checksums.pop(Path(path).name)


class CheckedWriter(FileSystemWriter):
    """Writes the parts of a sharded checkpoint into a folder that is empty; ``files`` says what it has written."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True)
        self.files = CheckedFiles()
        self.fs = self.files

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part. Errors of the disk are raised: other ranks see no more of an error than itself."""
        with naming_disk_errors():
            return super().write_data(plan, planner)


def save_values(values: Any, file: Any) -> None:
    """Do what ``torch.save`` does, but raise the error of the disk itself."""
    with naming_disk_errors():
        torch.save(values, file)


@contextmanager
def naming_disk_errors() -> Generator[None, None, None]:
    """Raise the error of the disk itself. ``torch.save`` says instead that its archive has no proper end."""
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise cause from None


def naming_full_disk(write: Callable[[], Result], folder: Path, num_bytes: int) -> Result:
    """Write something, and say how much of what was missing if the disk is full.

    Args:
        write: What to do.
        folder: On the disk.
        num_bytes: That it takes.

    Raises:
        CheckpointError: If the disk is full.
    """
    free = shutil.disk_usage(folder).free
    try:
        return write()
    except (OSError, CheckpointException) as error:
        if not _is_full(error):
            raise
        raise CheckpointError(
            f"the disk of {folder} is full: the checkpoint needs {format_bytes(num_bytes)}, and "
            f"{format_bytes(free)} were free. Free some space, or save to another disk. A previous checkpoint of "
            "this name is unchanged."
        ) from error


def _is_full(error: BaseException) -> bool:
    errors = [each for each, _ in error.failures.values()] if isinstance(error, CheckpointException) else [error]
    return any(isinstance(each, OSError) and each.errno in _FULL for each in errors)


class _CheckedStream(io.BufferedIOBase):
    def __init__(self, stream: io.IOBase) -> None:
        super().__init__()
        self.checksum = Checksum()
        self._stream: Any = stream

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._stream.write(view)
        self.checksum.add(view)
        return view.nbytes

    def tell(self) -> int:
        return self.checksum.num_bytes

    def flush(self) -> None:
        self._stream.flush()

    def fileno(self) -> int:
        return int(self._stream.fileno())
