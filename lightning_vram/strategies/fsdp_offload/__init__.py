"""See :class:`FSDPOffloadStrategy`."""

from lightning_vram.strategies.fsdp_offload.arguments import Offload
from lightning_vram.strategies.fsdp_offload.checkpoints import local_path
from lightning_vram.strategies.fsdp_offload.strategy import STRATEGY_NAMES, FSDPOffloadStrategy, register_strategies

__all__ = ["STRATEGY_NAMES", "FSDPOffloadStrategy", "Offload", "local_path", "register_strategies"]
