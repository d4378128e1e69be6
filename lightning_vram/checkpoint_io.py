"""Write and read checkpoints without a copy in host memory, as a plugin. May import: techniques, core, memory.

Lightning's own plugin makes the whole file in host memory before it writes a byte, and reads all of it before the first
state goes to its device: the host holds weights and optimizer state once more. Device memory is the same either way.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.plugins.io import TorchCheckpointIO
from typing_extensions import override

from lightning_vram.techniques.sharded_checkpoints import local_path, read_values, write_file


class StreamedCheckpointIO(TorchCheckpointIO):
    """Write checkpoint files tensor by tensor and memory-map them for reading, without a copy in host memory. Exact.

    Files are ordinary Lightning checkpoints: any Trainer reads them, and this plugin reads those of any Trainer. Writes
    are atomic: the file gets a hidden name in the target folder and replaces the previous checkpoint once it is
    complete on disk, so a killed process leaves the previous one. Remote paths (``s3://``, ``memory://``) use
    Lightning's plugin. Loaded tensors are on the CPU. For strategies that save through the plugin: a single device,
    DDP.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import StreamedCheckpointIO
        >>> trainer = pl.Trainer(plugins=[StreamedCheckpointIO()], logger=False)
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint.

        Raises:
            TypeError: If there are ``storage_options``.
            IsADirectoryError: If there is a folder of this name.
            OSError: If the file cannot be written, for example to a full disk. A previous one is unchanged.
        """
        file = local_path(str(path))
        if storage_options is not None or file is None:
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        file = file.absolute()
        if file.is_dir():
            raise IsADirectoryError(f"{file} is a folder; a checkpoint is a file. Choose another name.")
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(checkpoint, file)

    @override
    def load_checkpoint(
        self, path: str | Path, map_location: Callable[..., Any] | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint; its tensors are memory-mapped from the file.

        Raises:
            FileNotFoundError: If there is no such file.
            CheckpointError: If the file is damaged.
            pickle.UnpicklingError: If it contains classes that ``weights_only`` does not allow.
        """
        if map_location is not None or not os.path.isfile(path):
            return super().load_checkpoint(path, map_location or _on_host, weights_only)
        return read_values(Path(path), weights_only=weights_only)  # type: ignore[no-any-return]


def _on_host(storage: Any, location: str) -> Any:
    return storage
