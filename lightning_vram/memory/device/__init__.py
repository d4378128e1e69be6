"""The device: what its allocator says, how much room is left, what an out-of-memory error looks like."""
