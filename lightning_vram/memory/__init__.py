"""How much: live bytes, allocator statistics, units, out-of-memory errors. Imports ``torch``, never ``lightning``."""
