"""Full and sharded state dicts, checked, and written whole or not at all. May import: core, memory."""

from lightning_vram.techniques.sharded_checkpoints.broken_files import explained, read_values
from lightning_vram.techniques.sharded_checkpoints.checksums import check_archive
from lightning_vram.techniques.sharded_checkpoints.files import (
    delete,
    delete_leftovers,
    publish,
    recover,
    remove,
    temporary_path,
)
from lightning_vram.techniques.sharded_checkpoints.folder import (
    MODULE_STATES,
    REST_FILE,
    ShardedFolder,
    is_sharded_folder,
)
from lightning_vram.techniques.sharded_checkpoints.full_states import (
    check_groups,
    gather_module_state,
    gather_optimizer_state,
    load_module_state,
    load_optimizer_state,
)
from lightning_vram.techniques.sharded_checkpoints.parameter_names import parameters_by_name
from lightning_vram.techniques.sharded_checkpoints.sharded_states import (
    sharded_module_state,
    sharded_optimizer_state,
    write_folder,
)
from lightning_vram.techniques.sharded_checkpoints.state_trees import count_bytes, snapshot
from lightning_vram.techniques.sharded_checkpoints.written_files import naming_full_disk, save_values

__all__ = [
    "MODULE_STATES",
    "REST_FILE",
    "ShardedFolder",
    "check_archive",
    "check_groups",
    "count_bytes",
    "delete",
    "delete_leftovers",
    "explained",
    "gather_module_state",
    "gather_optimizer_state",
    "is_sharded_folder",
    "load_module_state",
    "load_optimizer_state",
    "naming_full_disk",
    "parameters_by_name",
    "publish",
    "read_values",
    "recover",
    "remove",
    "save_values",
    "sharded_module_state",
    "sharded_optimizer_state",
    "snapshot",
    "temporary_path",
    "write_folder",
]
