"""Names of the strategy for a Trainer: ``Trainer(strategy="fsdp_offload")``."""

from lightning.pytorch.strategies import StrategyRegistry

from lightning_vram.strategies.fsdp_offload.arguments import Offload
from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy

STRATEGY_NAMES: dict[str, Offload] = {"fsdp_offload": "params", "fsdp_offload_optimizer": "optimizer"}


def register_strategies() -> None:
    """Register the names with Lightning; repeated calls do nothing."""
    for name, offload in STRATEGY_NAMES.items():
        if name not in StrategyRegistry:
            description = f"FSDP2 for any module, with host offload: {offload}"
            StrategyRegistry.register(name, FSDPOffloadStrategy, description, offload=offload)
