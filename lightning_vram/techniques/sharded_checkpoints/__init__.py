"""Full and sharded state dicts, verified, and written completely or not at all. May import: core, memory."""

from lightning_vram.techniques.sharded_checkpoints.folder import (
    MODULE_STATES,
    consolidate,
    local_path,
    read_values,
    write_file,
)
from lightning_vram.techniques.sharded_checkpoints.store import CheckpointStore

__all__ = ["MODULE_STATES", "CheckpointStore", "consolidate", "local_path", "read_values", "write_file"]
