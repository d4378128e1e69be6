"""What a training step uses on a GPU you do not have: fake tensors, CUDA's kernels, its allocator, GPUs by name."""
