"""A sharded checkpoint: a folder to which each rank writes its part, and from which any number of ranks read theirs.

The layout is that of Lightning's ``ModelParallelStrategy``: ``torch.distributed.checkpoint`` with the keys
``state_dict``, ``optimizer_0``, ... and ``meta.pt`` with the rest. ``checksums.json``, written last, is ours. No rank
ever holds more than its part; what is the same on all ranks, such as buffers, rank 0 writes.
"""

import contextlib
import io
import json
import re
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from lightning_vram.core.ranks import current_rank, gather_objects, num_ranks, on_all_ranks
from lightning_vram.core.tensors.codecs import decoded
from lightning_vram.private_names.checkpoints import read_metadata, unflatten_state_dict
from lightning_vram.techniques.sharded_checkpoints.files import (
    CHECKSUM_FILE,
    CheckedWriter,
    check_folder,
    delete,
    delete_leftovers,
    explained,
    naming_disk_errors,
    publish,
    read_values,
    temporary_path,
    write_file,
)
from lightning_vram.techniques.sharded_checkpoints.states import Pairs, map_leaves, prepare, renamed

METADATA_FILE, REST_FILE = ".metadata", "meta.pt"
MODULE_STATES = ("state_dict", "current_model_state")  # with averaged weights, these are in the first
_OPTIMIZER = re.compile(r"optimizer_\d+")


def is_sharded_folder(path: Path) -> bool:
    """Whether this is a complete sharded checkpoint."""
    return (path / REST_FILE).is_file() and (path / METADATA_FILE).is_file()


class ShardedFolder:
    """A folder of :func:`write_folder`, the same for all ranks. All calls are collectives.

    Errors of one rank are raised on all: ``CheckpointError`` if the folder cannot be read or is damaged,
    ``pickle.UnpicklingError`` for what ``weights_only`` (see ``torch.load``) does not allow. ``verify``: compare the
    files with their checksums, if there are any.
    """

    def __init__(self, folder: Path, *, weights_only: bool | None = None, verify: bool = True) -> None:
        self._folder = folder
        self._weights_only = weights_only
        self._keys = WeakTensorKeyDictionary()  # of the tensors of read_states
        if verify:
            self._read(lambda: check_folder(folder, current_rank(), num_ranks()))
        self._metadata: Metadata = self._read(lambda: explained(partial(_read_metadata, folder), METADATA_FILE))
        self._paths: dict[str, tuple[str | int, ...]] = dict(self._metadata.planner_data or {})  # in the nested states

    def read_rest(self) -> dict[str, Any]:
        """Read everything but the states of modules and optimizers."""
        path, weights_only = self._folder / REST_FILE, self._weights_only
        rest: dict[str, Any] = self._read(partial(read_values, path, weights_only=weights_only))
        return rest

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

    def read_tensors(self, pairs: Pairs, on_read: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Read tensors of :meth:`read_states` into others, sharded ones in part; ``on_read`` gets the bytes so far."""
        self._load({self._keys[value]: into for value, into in pairs}, on_read)

    def _load(self, flat: dict[str, Any], on_read: Callable[[int], None] = lambda num_bytes: None) -> dict[str, Any]:
        planner = _LoadPlanner(on_read, weights_only=self._weights_only)
        reader = _Reader(self._folder, self._metadata)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process may read a folder
            read = partial(load, flat, storage_reader=reader, planner=planner)
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

    def __init__(self, on_read: Callable[[int], None], *, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._num_bytes, self._on_read, self._weights_only = 0, on_read, weights_only

    @override
    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        self._num_bytes += tensor.nbytes
        self._on_read(self._num_bytes)

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, weights_only=self._weights_only)


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
    temporary = temporary_path(path)
    writer = CheckedWriter(temporary)
    try:
        save(
            map_leaves(states, lambda leaf: leaf),  # new dicts: torch may flatten them
            storage_writer=writer,
            planner=_SavePlanner(dedup_save_to_lowest_rank=True),
            process_group=process_group,
        )
        of_ranks = gather_objects(writer.files.checksums, process_group)
        if current_rank() == 0:
            with naming_disk_errors(), writer.files.create_stream(temporary / REST_FILE, "wb") as file:
                torch.save(rest, file)
            of_ranks.append(writer.files.checksums)  # with that of the rest
            checksums = {name: checksum for each in of_ranks for name, checksum in each.items()}
            (temporary / CHECKSUM_FILE).write_text(json.dumps(dict(sorted(checksums.items()))))
            publish(temporary, path)
    except BaseException:
        if current_rank() == 0:
            with contextlib.suppress(OSError):
                delete(temporary)
        raise


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
    optimizer reads. ``on_progress`` gets the stage and its finished share, and may raise ``KeyboardInterrupt``.
    """
    if not is_sharded_folder(folder):
        raise FileNotFoundError(f"{folder} is not a sharded checkpoint: a folder with .metadata and meta.pt.")
    if output.is_dir():
        raise IsADirectoryError(f"{output} is a folder: name a file to write.")
    on_progress("verifying checksums" if verify else "reading", 0.0)
    source = ShardedFolder(folder, weights_only=weights_only, verify=verify)
    pairs: Pairs = []
    checkpoint = {**prepare(source.read_states(), pairs), **source.read_rest()}
    num_bytes = max(1, sum(into.nbytes for _, into in pairs))
    source.read_tensors(pairs, lambda read: on_progress("reading", read / num_bytes))
    if "optimizer_states" in checkpoint:
        checkpoint["optimizer_states"] = [renamed(state) for state in checkpoint["optimizer_states"]]
    prepare_path(output)
    write_file(checkpoint, output, lambda written: on_progress("writing", min(1.0, written / num_bytes)))
