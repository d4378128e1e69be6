"""States of a sharded module and its optimizers in a folder to which each rank writes its own part.

No rank ever holds more than its part, and any number of ranks can read the folder. It is laid out as Lightning's
``ModelParallelStrategy`` does: ``torch.distributed.checkpoint`` with the keys ``state_dict``, ``optimizer_0``, ... and
``meta.pt`` with all the rest; ``checksums.json``, written last, is ours. What is the same on all ranks, such as
buffers, is rank 0's.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.core.processes.rank_errors import current_rank, gather_objects
from lightning_vram.core.tensors.low_bit import decoded
from lightning_vram.techniques.sharded_checkpoints.checksums import write_checksums
from lightning_vram.techniques.sharded_checkpoints.folder import REST_FILE
from lightning_vram.techniques.sharded_checkpoints.parameter_names import clean_name, names_in_optimizer
from lightning_vram.techniques.sharded_checkpoints.state_trees import map_leaves
from lightning_vram.techniques.sharded_checkpoints.written_files import CheckedWriter, save_values


def sharded_module_state(module: nn.Module) -> dict[str, Any]:
    """Take a module's state without collecting it: its own tensors, under the names of a plain module."""
    return {clean_name(key): value for key, value in module.state_dict().items()}


def sharded_optimizer_state(module: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Take an optimizer's state without collecting it, and without making one where there is none yet.

    Args:
        module: Has the optimizer's parameters.
        optimizer: Its states may be sharded tensors.

    Returns:
        ``optimizer.state_dict()`` with clean parameter names for integers. Its tensors are the optimizer's own.

    Raises:
        ValueError: If the module does not have one of the parameters.
    """
    packed = optimizer.state_dict()
    names: dict[Any, str] = {}
    groups = []
    for group, own_names in zip(packed["param_groups"], names_in_optimizer(module, optimizer), strict=True):
        names.update(zip(group["params"], own_names, strict=True))
        groups.append({**group, "params": own_names})
    state = {names.get(key, key): values for key, values in packed["state"].items()}
    return {**packed, "state": state, "param_groups": groups}


class _Planner(DefaultSavePlanner):
    """Writes what is kept in 8 bit as float32, one tensor after the other."""

    @override
    def lookup_object(self, index: MetadataIndex) -> Any:
        return decoded(super().lookup_object(index))


def write_folder(
    state: Mapping[str, Any], rest: Mapping[str, Any], folder: Path, process_group: dist.ProcessGroup | None
) -> None:
    """Write a checkpoint. A collective.

    Args:
        state: ``state_dict`` and ``optimizer_0``, ... as the functions above give them.
        rest: Everything else; rank 0's is written.
        folder: Exists, is empty, and is the same for all ranks.
        process_group: Of all ranks; ``None`` takes the default one. A thread needs one of its own.

    Raises:
        CheckpointException: If a rank cannot write its part; on every rank.
        OSError: If rank 0 cannot write the rest; on rank 0.
    """
    writer = CheckedWriter(folder)
    save(
        map_leaves(dict(state), lambda leaf: leaf),  # dicts of its own: it may flatten them
        storage_writer=writer,
        planner=_Planner(dedup_save_to_lowest_rank=True),
        process_group=process_group,
    )
    of_ranks = gather_objects(writer.files.checksums, process_group)
    if current_rank() == 0:
        with writer.files.create_stream(folder / REST_FILE, "wb") as file:
            save_values(dict(rest), file)
        of_ranks.append(writer.files.checksums)  # with that of the rest
        write_checksums(folder, {name: checksum for each in of_ranks for name, checksum in each.items()})
