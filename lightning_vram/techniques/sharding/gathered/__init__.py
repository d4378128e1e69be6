"""What is done with a weight while it is gathered: reads, writes, uses. May import: core, memory."""

from lightning_vram.techniques.sharding.gathered.narrow_gradients import (
    keep_narrow,
    narrow_of,
    narrow_part,
    scale_narrow,
    wide_part,
    widen,
)
from lightning_vram.techniques.sharding.gathered.settable_shards import gathered_of, make_settable, set_gathered
from lightning_vram.techniques.sharding.gathered.watched_shards import unwatch, watch
from lightning_vram.techniques.sharding.gathered.weight_reads import WeightReads, observe
from lightning_vram.techniques.sharding.gathered.whole_numbers import WholeNumbers

__all__ = [
    "WeightReads",
    "WholeNumbers",
    "gathered_of",
    "keep_narrow",
    "make_settable",
    "narrow_of",
    "narrow_part",
    "observe",
    "scale_narrow",
    "set_gathered",
    "unwatch",
    "watch",
    "wide_part",
    "widen",
]
