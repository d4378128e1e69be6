"""CUDA's caching allocator, simulated: which segments it would take from the driver for a stream of allocations.

The rules are those of PyTorch 2.11 to 2.15: ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h``.
"""
