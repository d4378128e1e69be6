"""Optimizers that step on the host during training."""

from lightning_vram.optimizers.on_host.host_memory import (
    HostMemory,
    HostNeeds,
    add_states,
    count_host_needs,
    margin_bytes,
)
from lightning_vram.optimizers.on_host.optimizers import HostOptimizers, OffloadedAdamW
from lightning_vram.optimizers.on_host.split_steps import LowPrecisionStates, step_in_parts, upcast_when_stepped

__all__ = [
    "HostMemory",
    "HostNeeds",
    "HostOptimizers",
    "LowPrecisionStates",
    "OffloadedAdamW",
    "add_states",
    "count_host_needs",
    "margin_bytes",
    "step_in_parts",
    "upcast_when_stepped",
]
