"""Optimizers that step on the host, beside the training. May import: optimizers.stepping, techniques, core, memory."""
