"""States of an optimizer in a file, streamed through a step.

May import: optimizers.stepping, techniques, core, memory.
"""
