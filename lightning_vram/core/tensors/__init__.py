"""Versions of tensors, the memory behind them, tensors in nested structures, and codecs. May import: memory."""
