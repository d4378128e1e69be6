"""See :class:`EarlyRelease`."""

from lightning_vram.callbacks.early_release.callback import EarlyRelease

__all__ = ["EarlyRelease"]
