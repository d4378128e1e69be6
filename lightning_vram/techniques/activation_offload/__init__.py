"""Saved tensors to host memory or disk, and back in time for the backward. May import: core, memory."""

from lightning_vram.techniques.activation_offload.places import OffloadMeasures
from lightning_vram.techniques.activation_offload.stage import ActivationOffloading, OffloadReport, check_max_slowdown

__all__ = ["ActivationOffloading", "OffloadMeasures", "OffloadReport", "check_max_slowdown"]
