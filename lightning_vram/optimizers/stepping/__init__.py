"""How somebody else steps in the place of an optimizer; the other rooms share it.

May import: techniques, core, memory.
"""
