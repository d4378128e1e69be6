"""Files of a checkpoint, complete or absent, with checksums and clear errors; and sharded ones, folders of such files.

New content is written under a hidden name, then renamed in one step. A file replaces a file atomically everywhere; a
folder only where the system can exchange two names (Linux, most local file systems). Elsewhere that takes two renames,
and :func:`recover` undoes the first if the process was killed between them. The old content is deleted afterwards, so
the disk briefly holds both.

To a sharded checkpoint each rank writes its part, and any number of ranks read theirs. The layout is that of
Lightning's ``ModelParallelStrategy``: ``torch.distributed.checkpoint`` with the keys ``state_dict``, ``optimizer_0``,
... and ``meta.pt`` with the rest. No rank ever holds more than its part; what is the same on all ranks, such as
buffers, rank 0 writes.
"""

import contextlib
import ctypes
import hashlib
import io
import os
import pickle
import re
import shutil
import uuid
import warnings
import zipfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from lightning_vram.core.ranks import CheckpointError, current_rank, num_ranks, on_all_ranks
from lightning_vram.core.tensors.codecs import decoded
from lightning_vram.private_names.checkpoints import read_metadata, unflatten_state_dict
from lightning_vram.techniques.sharded_checkpoints.states import Pairs, map_leaves, prepare, renamed

_AT_FDCWD = -100  # of Linux's fcntl.h: paths are relative to the working directory
_RENAME_EXCHANGE = 2


def local_path(location: str) -> Path | None:
    """Convert an address without a protocol, or with ``file://``, to a path; ``None`` for a remote one."""
    path = location.removeprefix("file://")
    return None if "://" in path or "::" in path else Path(path)


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


# All that torch.save writes is a zip archive, with CRC-32 checksums, which torch.load does not compare. They detect
# bytes changed by a disk or a copy, not on purpose.
_CHUNK_BYTES = 2**23


def check_folder(folder: Path, metadata: Metadata, part: int = 0, num_parts: int = 1) -> None:
    """Raise ``CheckpointError`` if the archives of a sharded checkpoint are damaged; a rank reads one part of them."""
    entries = [one for one in (metadata.storage_data or {}).values() if not one.transform_descriptors]
    entries.sort(key=lambda one: (-one.length, one.relative_path, one.offset))  # the largest first
    for entry in entries[part::num_parts]:
        with (folder / entry.relative_path).open("rb") as file:
            file.seek(entry.offset)
            _check_zip(io.BytesIO(file.read(entry.length)), entry.relative_path)
    check_archive(folder / REST_FILE, part, num_parts)


def check_archive(path: Path, part: int = 0, num_parts: int = 1) -> None:
    """Raise ``CheckpointError`` if entries of a ``torch.save`` archive are damaged; a rank reads one part of them."""
    if is_archive(path):
        _check_zip(path, path.name, part, num_parts)


def _check_zip(source: Path | io.BytesIO, name: str, part: int = 0, num_parts: int = 1) -> None:
    try:
        with zipfile.ZipFile(source) as archive:
            entries = sorted(archive.infolist(), key=lambda entry: (-entry.file_size, entry.filename))
            for entry in entries[part::num_parts]:
                with archive.open(entry) as file:
                    while file.read(_CHUNK_BYTES):
                        pass
    except OSError:
        raise
    except Exception as error:  # of zipfile, zlib or struct
        raise CheckpointError(
            f"{name} is damaged ({error}). Resume from another checkpoint, or load this one without the check: "
            "verify=False."
        ) from error


def is_archive(path: Path) -> bool:
    """Whether a file is a zip archive of ``torch.save``, which can be memory-mapped."""
    with path.open("rb") as file:
        return file.read(4) == b"PK\x03\x04"


class _Writer(FileSystemWriter):
    """Writes one rank's part of a sharded checkpoint into an empty folder."""

    @override
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name files after this save: a copy over another one that breaks off leaves none of its files for ours."""
        plans, name = super().prepare_global_plan(plans), uuid.uuid4().hex[:8]
        places = [replace(plan.storage_data, prefix=f"{plan.storage_data.prefix}{name}_") for plan in plans]
        return [replace(plan, storage_data=place) for plan, place in zip(plans, places, strict=True)]

    @override
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's part; raise disk errors themselves: other ranks see the error without its cause."""
        with naming_disk_errors():
            return super().write_data(plan, planner)


@contextmanager
def _replacing(path: Path, *, is_main: bool) -> Generator[Path, None, None]:
    """Give a hidden path to write to; the main rank publishes it, or deletes it on an error."""
    temporary = temporary_path(path)
    try:
        yield temporary
        if is_main:
            publish(temporary, path)
    except BaseException:
        if is_main:
            with contextlib.suppress(OSError):
                delete(temporary)
        raise


def write_file(values: Any, path: Path) -> None:
    """Replace a file by one of ``torch.save``; on error, such as ``OSError`` of a full disk, it is unchanged."""
    with _replacing(path, is_main=True) as temporary, naming_disk_errors(), temporary.open("wb") as file:
        torch.save(values, file)


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


_MAX_REASON = 200
_CLASS = re.compile(r"GLOBAL ([\w.]+)")  # in the message of torch.load(weights_only=True)
# clear by themselves: a missing class, the disk; Ctrl-C is no damage
_CLEAR = (AttributeError, CheckpointError, ImportError, KeyboardInterrupt, MemoryError, OSError)


def read_values(path: Path, *, weights_only: bool | None) -> Any:
    """Read a ``torch.save`` file into host memory, memory-mapped if possible; ``CheckpointError`` if it is damaged."""
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


METADATA_FILE, REST_FILE = ".metadata", "meta.pt"
MODULE_STATES = ("state_dict", "current_model_state")  # with averaged weights, these are in the first
_OPTIMIZER = re.compile(r"optimizer_\d+")


def is_sharded_folder(path: Path) -> bool:
    """Whether this is a complete sharded checkpoint."""
    return (path / REST_FILE).is_file() and (path / METADATA_FILE).is_file()


class ShardedFolder:
    """A folder of :func:`write_folder`, the same for all ranks. All calls are collectives, and raise errors of any."""

    def __init__(self, folder: Path, *, weights_only: bool | None = None, verify: bool = True) -> None:
        self._folder = folder
        self._weights_only = weights_only
        self._keys = WeakTensorKeyDictionary()  # of the tensors of read_states
        self._metadata: Metadata = self._read(lambda: explained(partial(_read_metadata, folder), METADATA_FILE))
        if verify:
            self._read(lambda: check_folder(folder, self._metadata, current_rank(), num_ranks()))
        self._paths: dict[str, tuple[str | int, ...]] = dict(self._metadata.planner_data or {})  # in the nested states

    def read_rest(self) -> dict[str, Any]:
        """Read everything but the states of modules and optimizers."""
        return self._read(partial(read_values, self._folder / REST_FILE, weights_only=self._weights_only))  # type: ignore[no-any-return]

    def read_states(self) -> dict[str, Any]:
        """Read the states of modules, and "optimizer_states", with names of parameters instead of numbers.

        Their tensors are whole ones on the meta device, for :meth:`read_tensors`.
        """
        flat: dict[str, Any] = {}
        for key in self._paths:
            entry = self._metadata.state_dict_metadata[key]
            flat[key] = None  # pickled
            if isinstance(entry, TensorStorageMetadata):
                flat[key] = torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
                self._keys[flat[key]] = key
        flat |= self._load({key: None for key, value in flat.items() if value is None})
        states = unflatten_state_dict(flat, self._paths)
        roots = sorted((root for root in states if _OPTIMIZER.fullmatch(root)), key=lambda root: int(root[10:]))
        optimizers = [{"state": {}, **states.pop(root)} for root in roots]
        return {**states, "optimizer_states": optimizers} if optimizers else states

    def read_tensors(self, pairs: Pairs) -> None:
        """Read tensors of :meth:`read_states` into others, sharded ones in part."""
        self._load({self._keys[value]: into for value, into in pairs})

    def _load(self, flat: dict[str, Any]) -> dict[str, Any]:
        planner = _LoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        planner.weights_only = self._weights_only
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process may read a folder
            read = partial(load, flat, storage_reader=_Reader(self._folder, self._metadata), planner=planner)
            self._read(lambda: explained(read, "one of its files"))
        return flat

    def _read(self, action: Any) -> Any:
        return on_all_ranks(action, f"The checkpoint {self._folder} could not be read")


def _read_metadata(folder: Path) -> Metadata:
    with (folder / METADATA_FILE).open("rb") as file:
        index = read_metadata(file)
    if set(index.planner_data or ()) - set(index.state_dict_metadata):
        raise KeyError("an entry is not described")
    return index


class _Reader(FileSystemReader):
    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index  # torch would unpickle it, and run any code


class _LoadPlanner(DefaultLoadPlanner):
    """For a flat state."""

    weights_only: bool | None = None

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=self.weights_only)


class _SavePlanner(DefaultSavePlanner):
    """Dequantizes low-bit state to fp32, one tensor at a time."""

    @override
    def lookup_object(self, index: MetadataIndex) -> Any:
        return decoded(super().lookup_object(index))


def write_folder(checkpoint: Mapping[str, Any], path: Path, process_group: dist.ProcessGroup | None) -> None:
    """Replace the checkpoint at a path, the same for all ranks; on error, nothing changes there. A collective.

    Its states are not gathered; of the rest, rank 0's is written. A thread needs its own ``process_group``. If a rank
    cannot write its part, all raise ``CheckpointException``; what only rank 0 does raises only there.
    """
    rest = dict(checkpoint)
    states = {key: rest.pop(key) for key in MODULE_STATES if key in rest}
    states |= {f"optimizer_{index}": state for index, state in enumerate(rest.pop("optimizer_states", ()))}
    is_main = current_rank() == 0
    with _replacing(path, is_main=is_main) as temporary:
        save(
            map_leaves(states, lambda leaf: leaf),  # new dicts: torch may flatten them
            storage_writer=_Writer(temporary),
            planner=_SavePlanner(dedup_save_to_lowest_rank=True),
            process_group=process_group,
        )
        if is_main:
            with naming_disk_errors(), (temporary / REST_FILE).open("wb") as file:
                torch.save(rest, file)


def prepare_path(path: Path) -> None:
    """Make a path ready for a new checkpoint; ``IsADirectoryError`` for a folder that is none."""
    if path.is_dir() and not is_sharded_folder(path) and any(path.iterdir()):
        raise IsADirectoryError(
            f"{path} is a folder, but not a checkpoint, and is not overwritten. Choose another name."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    delete_leftovers(path)


def consolidate(
    folder: Path,
    output: Path,
    *,
    weights_only: bool | None = None,
    verify: bool = True,
    on_progress: Callable[[str, float], None] = lambda stage, done: None,
) -> None:
    """Write a sharded checkpoint as one file for a Trainer on one device; on error, ``output`` is unchanged.

    Needs host memory for all of it, and one process. Lightning's own tool writes optimizer states under names that no
    optimizer reads. ``on_progress`` gets the stage, and may raise ``KeyboardInterrupt``.
    """
    if not is_sharded_folder(folder):
        raise FileNotFoundError(f"{folder} is not a sharded checkpoint: a folder with .metadata and meta.pt.")
    if output.is_dir():
        raise IsADirectoryError(f"{output} is a folder: name a file to write.")
    on_progress("verifying checksums", 0.0)
    source = ShardedFolder(folder, weights_only=weights_only, verify=verify)
    pairs: Pairs = []
    checkpoint = {**prepare(source.read_states(), pairs), **source.read_rest()}
    on_progress("reading", 0.0)
    source.read_tensors(pairs)
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [renamed(state) for state in checkpoint["optimizer_states"]]
    prepare_path(output)
    on_progress("writing", 0.0)
    write_file(checkpoint, output)
    on_progress("writing", 1.0)
