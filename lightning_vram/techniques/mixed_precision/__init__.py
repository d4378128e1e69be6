"""Loss scaling, float32 islands, 16-bit norms, casts of weights. May import: core, memory."""

from lightning_vram.techniques.mixed_precision.loss_scaling import LossScaling, note_unscaled, unscale_part
from lightning_vram.techniques.mixed_precision.module_precision import Float32Islands, keep_norms_low, list_islands
from lightning_vram.techniques.mixed_precision.weight_casts import WeightCasts, find_autocast_weights

__all__ = [
    "Float32Islands",
    "LossScaling",
    "WeightCasts",
    "find_autocast_weights",
    "keep_norms_low",
    "list_islands",
    "note_unscaled",
    "unscale_part",
]
