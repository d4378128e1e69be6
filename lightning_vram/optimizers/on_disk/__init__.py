"""States of an optimizer in a file, streamed through a step.

May import: optimizers.stepping, techniques, core, memory.
"""

from lightning_vram.optimizers.on_disk.layouts import StateLayout, find_layout, is_elementwise
from lightning_vram.optimizers.on_disk.streamed import StreamedStates

__all__ = ["StateLayout", "StreamedStates", "find_layout", "is_elementwise"]
