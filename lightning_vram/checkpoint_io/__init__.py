"""How checkpoints get to files and back, as a plugin of the Trainer. May import: techniques, core, memory."""

from lightning_vram.checkpoint_io.plugin import StreamedCheckpointIO

__all__ = ["StreamedCheckpointIO"]
