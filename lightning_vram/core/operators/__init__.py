"""What is known of PyTorch's operators: which are cheap, which write, what they cost, which arguments must be exact.

May import: memory.
"""
