"""Optimizers that step on the host during training."""

from lightning_vram.optimizers.on_host.optimizers import HostOptimizers

__all__ = ["HostOptimizers"]
