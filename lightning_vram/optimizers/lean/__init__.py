"""Weights in 16 bits, with what they lack beside them. May import: optimizers.stepping, techniques, core, memory."""
