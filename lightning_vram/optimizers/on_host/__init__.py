"""Optimizers that step on the host during training."""

from lightning_vram.optimizers.on_host.host_memory import HostMemory, HostNeeds, add_states, count_host_needs
from lightning_vram.optimizers.on_host.optimizers import HostOptimizers

__all__ = ["HostMemory", "HostNeeds", "HostOptimizers", "add_states", "count_host_needs"]
