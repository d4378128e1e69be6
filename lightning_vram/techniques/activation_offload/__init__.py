"""Saved tensors to host memory or disk, and back in time for the backward. May import: core, memory."""

from lightning_vram.techniques.activation_offload.stage import ActivationOffloading, OffloadReport

__all__ = ["ActivationOffloading", "OffloadReport"]
