"""A plain DataLoader that knows its place, so that a run goes on with the batch after the last.

May import: core, memory.
"""
