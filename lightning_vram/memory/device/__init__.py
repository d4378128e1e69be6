"""The device: statistics of its allocator, free memory, out-of-memory errors."""
