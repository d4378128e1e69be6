"""Optimizers that step on the host, beside the training. May import: optimizers.stepping, techniques, core, memory."""

from lightning_vram.optimizers.on_host.averages import HostAverage
from lightning_vram.optimizers.on_host.host_room import HostNeeds, HostRoom, count_host_needs, count_state_bytes
from lightning_vram.optimizers.on_host.offloaded_adamw import OffloadedAdamW
from lightning_vram.optimizers.on_host.optimizers import HostOptimizers

__all__ = [
    "HostAverage",
    "HostNeeds",
    "HostOptimizers",
    "HostRoom",
    "OffloadedAdamW",
    "count_host_needs",
    "count_state_bytes",
]
