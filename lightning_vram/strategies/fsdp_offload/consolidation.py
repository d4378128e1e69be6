"""Convert a sharded checkpoint to one file."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lightning_vram.strategies.fsdp_offload.checkpoint_writing import write_checkpoint
from lightning_vram.techniques.sharded_checkpoints import ShardedFolder, is_sharded_folder


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
    checkpoint = {**source.read_states(partial(on_progress, "reading")), **source.read_rest()}
    roots = sorted((key for key in checkpoint if re.fullmatch(r"optimizer_\d+", key)), key=lambda key: int(key[10:]))
    optimizer_states = [_numbered(checkpoint.pop(root)) for root in roots]
    whole = {**checkpoint, "optimizer_states": optimizer_states} if roots else checkpoint
    write_checkpoint(whole, str(output), sharded=False, group=None, on_progress=partial(on_progress, "writing"))


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    numbers = {name: number for number, name in enumerate(name for g in state["param_groups"] for name in g["params"])}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    values = {numbers.get(name, name): value for name, value in state.get("state", {}).items()}
    return {**state, "state": values, "param_groups": groups}
