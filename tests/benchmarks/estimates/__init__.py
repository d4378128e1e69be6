"""What ``estimate_memory`` says, held against PyTorch's own allocator."""
