"""Attention as CUDA runs it: the choice of a kernel, and the kernels."""
