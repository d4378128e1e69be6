"""torch, but for FSDP2."""
