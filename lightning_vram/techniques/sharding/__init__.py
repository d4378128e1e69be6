"""FSDP2 with shards on the host, and its undo. May import: core, memory.

``apply.py`` shards a module; ``group.py`` and ``parameter.py`` replace FSDP2's objects.
"""

from lightning_vram.private_names.fsdp2 import can_reset as can_recover
from lightning_vram.techniques.sharding.apply import FirstStepMemory, FullSharding, ShardingOptions
from lightning_vram.techniques.sharding.flat_shards import FlatShard
from lightning_vram.techniques.sharding.group import ShardedGroup
from lightning_vram.techniques.sharding.grouping import find_named_weights, plan_sharding_groups
from lightning_vram.techniques.sharding.materialization import has_meta, materialize
from lightning_vram.techniques.sharding.parameter import (
    WholeNumbers,
    fp32_part,
    low_precision_of,
    low_precision_part,
    scale_low_precision,
    upcast,
)
from lightning_vram.techniques.sharding.removal import discard_failed_iteration

__all__ = [
    "FirstStepMemory",
    "FlatShard",
    "FullSharding",
    "ShardedGroup",
    "ShardingOptions",
    "WholeNumbers",
    "can_recover",
    "discard_failed_iteration",
    "find_named_weights",
    "fp32_part",
    "has_meta",
    "low_precision_of",
    "low_precision_part",
    "materialize",
    "plan_sharding_groups",
    "scale_low_precision",
    "upcast",
]
