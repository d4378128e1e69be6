"""CUDA's caching allocator, simulated: which segments it would take from the driver for a stream of allocations.

The rules are those of PyTorch 2.11 to 2.15: ``c10/cuda/CUDACachingAllocator.cpp`` and ``c10/core/AllocatorConfig.h``.
The allocators of 2.11 and 2.15, on a driver that was played, had the same bytes after each of 280,000 random
operations, with and without expandable segments, and over recorded training steps (``recorded_steps.json``).
"""
