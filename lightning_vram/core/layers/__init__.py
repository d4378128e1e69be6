"""Choose layers of a module: by class, name or pattern, as stages of a network or segments of a sequence.

May import: memory.
"""
