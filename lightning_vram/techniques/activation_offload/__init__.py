"""Saved tensors to host memory or disk, and back in time for the backward. May import: core, memory."""

from lightning_vram.techniques.activation_offload.argument_checks import check_max_slowdown
from lightning_vram.techniques.activation_offload.pace import OffloadMeasures
from lightning_vram.techniques.activation_offload.report import OffloadReport
from lightning_vram.techniques.activation_offload.stage import ActivationOffloading

__all__ = ["ActivationOffloading", "OffloadMeasures", "OffloadReport", "check_max_slowdown"]
