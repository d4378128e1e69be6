"""FSDP2 and sharded tensors: the classes of its objects, and what its states are called."""
