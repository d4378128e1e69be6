"""See :class:`EmptyCache`."""

from lightning_vram.callbacks.empty_cache.callback import EmptyCache

__all__ = ["EmptyCache"]
