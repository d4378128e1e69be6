"""Batch norm and an invertible activation keep one map instead of three. May import: core, memory."""
