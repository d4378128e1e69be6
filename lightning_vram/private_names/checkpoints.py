"""Private names of sharded checkpoints."""

import pickle
from collections import OrderedDict
from pathlib import PurePath
from typing import IO, Any

import torch
from torch.distributed.checkpoint import metadata as classes
from torch.distributed.checkpoint._nested_dict import unflatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata
from torch.serialization import _get_layout

__all__ = ["read_metadata", "unflatten_state_dict"]

_KNOWN: dict[tuple[str, str], Any] = {
    **{(classes.__name__, name): getattr(classes, name) for name in classes.__all__},
    (classes.__name__, _MEM_FORMAT_ENCODING.__name__): _MEM_FORMAT_ENCODING,
    (_StorageInfo.__module__, _StorageInfo.__name__): _StorageInfo,
    (_get_layout.__module__, _get_layout.__name__): _get_layout,
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): OrderedDict,
}


def read_metadata(file: IO[bytes]) -> Metadata:
    """Read ``.metadata`` without running code: contents that ``FileSystemWriter`` never writes raise an error."""
    metadata = _Reader(file).load()
    if not isinstance(metadata, Metadata):
        raise pickle.UnpicklingError(f"it is a {type(metadata).__name__}")
    return metadata


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is not None:
            return known
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.split(".")[0] == "pathlib" and name.endswith("Path"):  # where it was written, perhaps on Windows
            return PurePath
        if (module, name) == ("builtins", "getattr"):  # Python 3.11 pickles members of an Enum by it
            return _member
        raise pickle.UnpicklingError(f"it holds {module}.{name}")


def _member(kind: type, name: str) -> Any:
    if kind is not _MEM_FORMAT_ENCODING:
        raise pickle.UnpicklingError("it holds builtins.getattr")
    return _MEM_FORMAT_ENCODING[name]
