"""Versions of tensors, the memory behind them, tensors in nested structures. May import: memory."""
