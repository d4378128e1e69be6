"""See :class:`FSDPOffloadStrategy`."""

from lightning_vram.strategies.fsdp_offload.strategy import FSDPOffloadStrategy as FSDPOffloadStrategy
