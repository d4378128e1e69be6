"""Private names of FSDP2, ``DTensor``, sharded checkpoints and ``DistributedDataParallel``."""
