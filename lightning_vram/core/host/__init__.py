"""Host memory, copies beside the computation, files without names, threads that work beside the training.

May import: memory.
"""
