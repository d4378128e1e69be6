"""Swap a module's class, patch a method of one object, hold a process-wide setting; each with an undo.

A swapped class keeps what users rely on: names, ``state_dict``, ``torch.compile(fullgraph=True)`` and FSDP2 see the
module they know; copies and pickles are plain modules, so that a file does not need this package, unless a technique
goes into copies. Wrappers, patched ``forward`` methods and hooks each break one of these. Several techniques may take
one module, each under its own key: the last one runs first, and they are undone in any order.

May import: memory.
"""
