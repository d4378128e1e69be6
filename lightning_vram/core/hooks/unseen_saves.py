"""Graphs that end in the call that begins them: what they save concerns no other hooks."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd.graph import saved_tensors_hooks

from lightning_vram.core.hooks.stage import pack_in_place, unpack
from lightning_vram.private_names.torch.autograd import hide_warning_of_hooks, innermost_hooks


def unseen_saves() -> AbstractContextManager[Any]:
    """Return a context in which no hooks see what is saved, for a graph that ends in the call that begins it.

    Otherwise a checkpoint outside would recompute all of its layer to return the first tensor, and offload would copy
    it to the host and back at once.
    """
    if innermost_hooks() is None:
        return nullcontext()
    hide_warning_of_hooks()
    return saved_tensors_hooks(pack_in_place, unpack)
