"""What a training step takes on a device that is not there: fake tensors, CUDA's choices, its allocator, its cards."""
