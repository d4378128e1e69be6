"""Write and read checkpoints without a copy in host memory, as a plugin. May import: techniques, core, memory.

Lightning's own plugin makes the whole file in host memory before it writes a byte, and reads all of it before the first
state goes to its device: the host holds weights and optimizer state once more. Device memory is the same either way.
"""

from lightning_vram.checkpoint_io.plugin import StreamedCheckpointIO

__all__ = ["StreamedCheckpointIO"]
