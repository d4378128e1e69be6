"""Optimizer state in a file, streamed through a step."""

from lightning_vram.optimizers.on_disk.streamed import StreamedStates

__all__ = ["StreamedStates"]
