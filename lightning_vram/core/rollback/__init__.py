"""Restore a module as it was before a forward or step, to recompute or retry. May import: rooms of core below."""
