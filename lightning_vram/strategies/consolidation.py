"""One plain file out of a sharded checkpoint, for a Trainer on one device.

Lightning's own tool for this leaves the optimizers' states under names that no optimizer looks for.
"""

import re
from pathlib import Path
from typing import Any

import torch

from lightning_vram.private_names.lightning_files import load_sharded
from lightning_vram.strategies.sharded_folder import is_sharded_folder


def consolidate(folder: Path, output: Path) -> None:
    """Write a sharded checkpoint as a plain file. Needs host memory for all of it, and one process.

    Args:
        folder: As ``FSDPOffloadStrategy`` or Lightning's ``ModelParallelStrategy`` wrote it.
        output: The file to make; what is there is replaced.

    Raises:
        FileNotFoundError: If ``folder`` is no sharded checkpoint.
    """
    if not is_sharded_folder(folder):
        raise FileNotFoundError(f"{folder} is no sharded checkpoint: a folder with .metadata and meta.pt.")
    checkpoint = load_sharded(folder)
    roots = sorted((key for key in checkpoint if re.fullmatch(r"optimizer_\d+", key)), key=lambda key: int(key[10:]))
    optimizer_states = [_numbered(checkpoint.pop(root)) for root in roots]
    torch.save({**checkpoint, "optimizer_states": optimizer_states} if roots else checkpoint, output)


def _numbered(state: dict[str, Any]) -> dict[str, Any]:
    numbers = {name: number for number, name in enumerate(name for g in state["param_groups"] for name in g["params"])}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    values = {numbers.get(name, name): value for name, value in state.get("state", {}).items()}
    return {**state, "state": values, "param_groups": groups}
