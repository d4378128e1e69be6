"""Read, write and compare random generators, and the state around a forward. May import: core.tensors, memory."""
