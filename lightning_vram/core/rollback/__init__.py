"""Restore a module as it was before a forward or a step, for recomputation and for retries. May import: rooms of core."""
