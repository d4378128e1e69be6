"""The other ranks, and signals: votes, the same error on all ranks, lost peers, a clean end.

May import: the rooms of core below it, memory.
"""
