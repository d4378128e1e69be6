"""See :class:`MicroBatching`."""

from lightning_vram.callbacks.micro_batching.callback import MicroBatching

__all__ = ["MicroBatching"]
