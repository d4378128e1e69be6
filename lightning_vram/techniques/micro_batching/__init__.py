"""How many samples run at once: measured or given, agreed among ranks, remembered. May import: core, memory."""

from lightning_vram.techniques.micro_batching.agreed_sizes import Agreed, AgreedSizes, FixedSize
from lightning_vram.techniques.micro_batching.norm_counting import NormCounting
from lightning_vram.techniques.micro_batching.planning import PROBED_SIZES, SizePlanning
from lightning_vram.techniques.micro_batching.remembered_sizes import MicroBatchSizes

__all__ = [
    "PROBED_SIZES",
    "Agreed",
    "AgreedSizes",
    "FixedSize",
    "MicroBatchSizes",
    "NormCounting",
    "SizePlanning",
]
