"""Private names of Lightning's files: reading and writing checkpoints, here or far away."""

from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.cloud_io import _atomic_save, _is_local_file_protocol, _load

is_local: Callable[[str], bool] = _is_local_file_protocol
"""Whether a path is one of this file system, not an address."""
save_whole: Callable[[dict[str, Any], str], None] = _atomic_save
"""Write a checkpoint, or leave nothing."""


def load_on_host(location: str, *, weights_only: bool | None) -> Any:
    """Read a checkpoint from an address, with its tensors on the host."""
    return _load(location, "cpu", weights_only)
