"""Modules that treat tokens alone, some tokens at a time. May import: core, memory."""

from lightning_vram.techniques.token_tiling.apply import TilingHandle, apply_token_tiling

__all__ = ["TilingHandle", "apply_token_tiling"]
