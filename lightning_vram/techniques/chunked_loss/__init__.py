"""Losses of language models without full logits in memory. May import: core, memory."""

from lightning_vram.techniques.chunked_loss.apply import ChunkedLossHandle, apply_chunked_loss, settle

__all__ = ["ChunkedLossHandle", "apply_chunked_loss", "settle"]
