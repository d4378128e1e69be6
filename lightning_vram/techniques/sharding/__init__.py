"""FSDP2 with shards on the host, and its undo.

``apply.py`` shards a module; ``group.py`` and ``parameter.py`` take the place of FSDP2's objects. May import: core,
memory.
"""
