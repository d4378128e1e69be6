"""What CUDA's dispatcher does otherwise than that of a device without kernels, done there: same memory, no card."""
