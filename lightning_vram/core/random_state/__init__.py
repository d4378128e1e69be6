"""Read, write and compare every generator of random numbers. May import: core.tensors, memory."""
