"""Drop what a recipe of cheap operators can make again.

``stage.py`` is a stage of the saved-tensor pipeline and decides, ``recorder.py`` notes how tensors were made,
``rebuilding.py`` makes them again. May import: core, memory.
"""
