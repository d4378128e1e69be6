"""What a batch is made of: measure it, cut it, guard it against writes, weigh it, put its results together.

Used by micro-batching and accumulation. May import: memory.
"""
