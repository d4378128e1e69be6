"""Write the allocator's blocks to a file for https://pytorch.org/memory_viz."""

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_vram.private_names.cuda.snapshot import read_snapshot


def write_snapshot(path: Path, tensors: Iterable[tuple[str, Tensor]]) -> bool:
    """Write the blocks of CUDA's allocator, with names of known tensors; whether there was anything to write."""
    snapshot = read_snapshot()
    if snapshot is None:
        return False
    annotate(snapshot, {tensor.untyped_storage().data_ptr(): name for name, tensor in tensors})
    with path.open("wb") as file:
        pickle.dump(snapshot, file)
    return True


def annotate(snapshot: dict[str, Any], names: Mapping[int, str]) -> None:
    """Write into each block in use what it is for, by address; no stacks were recorded, so it takes their place."""
    for segment in snapshot["segments"]:
        address = segment["address"]
        for block in segment["blocks"]:
            start = block.get("address", address)
            if block["state"] == "active_allocated":
                said = names.get(start, "activations, temporaries and other tensors")
                block["frames"] = [{"filename": "", "line": 0, "name": said}, *block.get("frames", ())]
            address = start + block["size"]
