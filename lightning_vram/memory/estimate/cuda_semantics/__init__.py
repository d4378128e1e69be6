"""CUDA's choice of kernels and casts, on a fake device: same memory, no GPU."""
