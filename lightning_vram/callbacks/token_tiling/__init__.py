"""Modules that treat tokens alone, some tokens at a time."""

from lightning_vram.callbacks.token_tiling.callback import TokenTiling

__all__ = ["TokenTiling"]
