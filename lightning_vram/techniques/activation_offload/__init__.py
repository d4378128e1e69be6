"""Saved tensors to the host or a disk, and back in time for the backward.

``stage.py`` is a stage of the saved-tensor pipeline; items, places and transfers are what it moves, where and how.
May import: core, memory.
"""

from lightning_vram.techniques.activation_offload.stage import ActivationOffloading, OffloadReport

__all__ = ["ActivationOffloading", "OffloadReport"]
