"""Reads the files of a sharded checkpoint, without running what others may have put into their pickles."""

import io
import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from typing_extensions import override

from lightning_vram.private_names.fsdp2.checkpoint_metadata import read_metadata
from lightning_vram.techniques.sharded_checkpoints.broken_files import explained

METADATA_FILE = ".metadata"


def read_index(folder: Path) -> Metadata:
    """Read what is where in a folder.

    Raises:
        CheckpointError: If it is not what such a folder has.
    """

    def read() -> Metadata:
        with (folder / METADATA_FILE).open("rb") as file:
            index = read_metadata(file)
        if set(index.planner_data or ()) - set(index.state_dict_metadata):
            raise KeyError("an entry is not described")
        return index

    return explained(read, METADATA_FILE)


def read_entries(folder: Path, index: Metadata, entries: dict[str, Any], *, weights_only: bool | None) -> None:
    """Read entries of a folder, in place. A collective.

    Args:
        folder: It.
        index: Its.
        entries: By key, each with the tensor to read into; ``None`` for what is no tensor, whose place it takes.
        weights_only: For what is no tensor: see ``torch.load``.

    Raises:
        CheckpointError: If one is damaged; on every rank, as all other errors.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process may read a folder
        explained(
            lambda: load(
                entries,
                storage_reader=_Reader(folder, index),
                planner=_Planner(weights_only=weights_only),
            ),
            "one of its files",
        )


class _Reader(FileSystemReader):
    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self._index = index

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._index  # torch would unpickle it, whatever it runs


class _Planner(DefaultLoadPlanner):
    """For a state that is flat already."""

    def __init__(self, *, weights_only: bool | None) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._weights_only = weights_only

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        key = read_item.dest_index.fqn
        self.state_dict[key] = explained(lambda: torch.load(value, weights_only=self._weights_only), key)
