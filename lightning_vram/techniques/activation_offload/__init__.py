"""Saved tensors to the host or a disk, and back in time for the backward.

``stage.py`` is a stage of the saved-tensor pipeline; items, places and transfers are what it moves, where and how;
``pace.py`` measures how much can travel in time.
May import: core, memory.
"""

from lightning_vram.techniques.activation_offload.argument_checks import check_max_slowdown
from lightning_vram.techniques.activation_offload.pace import OffloadMeasures
from lightning_vram.techniques.activation_offload.report import OffloadReport
from lightning_vram.techniques.activation_offload.stage import ActivationOffloading

__all__ = ["ActivationOffloading", "OffloadMeasures", "OffloadReport", "check_max_slowdown"]
