"""Losses of language models without their logits."""

from lightning_vram.callbacks.chunked_loss.callback import ChunkedLoss

__all__ = ["ChunkedLoss"]
