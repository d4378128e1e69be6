"""Graphs that end in the call that begins them: what they save is nobody else's."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd.graph import saved_tensors_hooks

from lightning_vram.core.hooks.stage import pack_in_place, unpack
from lightning_vram.private_names.torch.autograd import hide_warning_of_hooks, innermost_hooks


def unseen_saves() -> AbstractContextManager[Any]:
    """Return a context in which nobody's hooks see what is saved.

    A checkpoint around would run all of its layer again to give the first tensor back, offloading would move it to the
    host and back at once.
    """
    if innermost_hooks() is None:
        return nullcontext()
    hide_warning_of_hooks()
    return saved_tensors_hooks(pack_in_place, unpack)
