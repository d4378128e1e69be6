"""Optimizers that step on the host during training."""

from lightning_vram.optimizers.on_host.averages import HostAverage
from lightning_vram.optimizers.on_host.host_needs import HostNeeds, add_states, count_host_needs
from lightning_vram.optimizers.on_host.host_room import HostRoom, margin_bytes
from lightning_vram.optimizers.on_host.narrow_states import NarrowStates, widen_when_stepped
from lightning_vram.optimizers.on_host.offloaded_adamw import OffloadedAdamW
from lightning_vram.optimizers.on_host.optimizers import HostOptimizers
from lightning_vram.optimizers.on_host.split_steps import step_in_parts

__all__ = [
    "HostAverage",
    "HostNeeds",
    "HostOptimizers",
    "HostRoom",
    "NarrowStates",
    "OffloadedAdamW",
    "add_states",
    "count_host_needs",
    "margin_bytes",
    "step_in_parts",
    "widen_when_stepped",
]
