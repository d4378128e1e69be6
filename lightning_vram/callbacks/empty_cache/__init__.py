"""See :class:`EmptyCache`."""

from lightning_vram.callbacks.empty_cache.callback import EmptyCache as EmptyCache
