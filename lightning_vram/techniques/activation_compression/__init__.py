"""Keep saved tensors in fewer bytes. ``stage.py`` is a stage of the saved-tensor pipeline.

May import: core, memory.
"""
