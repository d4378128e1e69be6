"""Full and sharded state dicts, verified, and written completely or not at all. May import: core, memory."""

from lightning_vram.techniques.sharded_checkpoints.files import (
    check_archive,
    explained,
    read_values,
    recover,
    remove,
    write_file,
)
from lightning_vram.techniques.sharded_checkpoints.folder import (
    MODULE_STATES,
    ShardedFolder,
    consolidate,
    is_sharded_folder,
    prepare_path,
    write_folder,
)
from lightning_vram.techniques.sharded_checkpoints.states import (
    Pairs,
    first_names,
    gather_module_state,
    gather_optimizer_state,
    load_module_state,
    load_optimizer_state,
    match_parameters,
    read_whole,
    sharded_module_state,
    sharded_optimizer_state,
    snapshot,
)

__all__ = [
    "MODULE_STATES",
    "Pairs",
    "ShardedFolder",
    "check_archive",
    "consolidate",
    "explained",
    "first_names",
    "gather_module_state",
    "gather_optimizer_state",
    "is_sharded_folder",
    "load_module_state",
    "load_optimizer_state",
    "match_parameters",
    "prepare_path",
    "read_values",
    "read_whole",
    "recover",
    "remove",
    "sharded_module_state",
    "sharded_optimizer_state",
    "snapshot",
    "write_file",
    "write_folder",
]
