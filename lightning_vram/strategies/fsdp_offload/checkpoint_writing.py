"""Write a checkpoint on all ranks, complete or not at all; convert a sharded one to a single file."""

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.cloud_io import get_filesystem

from lightning_vram.core.ranks import current_rank, on_all_ranks
from lightning_vram.private_names.lightning import is_local, save_whole
from lightning_vram.techniques.sharded_checkpoints import (
    Pairs,
    ShardedFolder,
    delete_leftovers,
    is_sharded_folder,
    prepare,
    remove,
    renamed,
    write_file,
    write_folder,
)


def write_checkpoint(
    checkpoint: Mapping[str, Any], location: str, *, sharded: bool, group: dist.ProcessGroup | None
) -> None:
    """Replace the checkpoint at a path, or remote address, that is the same on every rank. A collective.

    On error, nothing changes at the path. A thread needs its own ``group``.
    """
    failed = f"The checkpoint {location} could not be saved"

    def on_main(action: Callable[[], None]) -> None:
        on_all_ranks(action if current_rank() == 0 else lambda: None, failed, group)

    if not is_local(location):
        on_main(lambda: save_whole(dict(checkpoint), location))
        return
    path = local_path(location)
    on_main(lambda: _prepare(path))
    if sharded:
        on_all_ranks(partial(write_folder, checkpoint, path, group), failed, group)
    else:
        on_main(lambda: write_file(dict(checkpoint), path))


def remove_checkpoint(location: str) -> None:
    """Delete a checkpoint if it exists, or warn."""
    try:
        if is_local(location):
            remove(local_path(location))
        elif (files := get_filesystem(location)).exists(location):
            files.rm(location, recursive=True)
    except OSError as error:
        warnings.warn(f"The checkpoint {location} could not be removed: {error}.", stacklevel=3)


def local_path(location: str) -> Path:
    """Convert an address without a protocol, or with ``file://``, to a path."""
    return Path(location.removeprefix("file://"))


def _prepare(path: Path) -> None:
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
    _prepare(output)
    write_file(checkpoint, output, lambda written: on_progress("writing", min(1.0, written / num_bytes)))
