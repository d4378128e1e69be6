"""Private names of Lightning's files: reading and writing checkpoints, here or far away."""

from typing import Any

from lightning.fabric.utilities.cloud_io import _atomic_save, _is_local_file_protocol, _load


def is_local(location: str) -> bool:
    """Whether a path is one of this file system, not an address."""
    return _is_local_file_protocol(location)


def save_whole(checkpoint: dict[str, Any], location: str) -> None:
    """Write a checkpoint, or leave nothing."""
    _atomic_save(checkpoint, location)


def load_on_host(location: str, *, weights_only: bool | None) -> Any:
    """Read a checkpoint from an address, with its tensors on the host."""
    return _load(location, "cpu", weights_only)
