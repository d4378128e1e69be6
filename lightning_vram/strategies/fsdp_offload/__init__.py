"""See :class:`FSDPOffloadStrategy`."""

from lightning_vram.strategies.fsdp_offload.arguments import Offload
from lightning_vram.strategies.fsdp_offload.checkpoint_writing import local_path
from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy

__all__ = ["FSDPOffloadStrategy", "Offload", "local_path"]
