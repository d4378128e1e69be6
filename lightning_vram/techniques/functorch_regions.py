"""Step aside where ``torch.func`` transforms run: they refuse to run while saved-tensor hooks are set.

``torch.func.grad``, ``vjp``, ``vmap`` and their kin call ``torch.autograd.graph.disable_saved_tensors_hooks`` first,
which raises if there are any. Inside such a region nothing would be packed anyway; what it saves is left alone.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import graph
from torch.autograd.graph import saved_tensors_hooks


@contextmanager
def step_aside_for_functorch(hooks: saved_tensors_hooks) -> Iterator[None]:
    """Take ``hooks``, which are set, off for the time of each ``torch.func`` transform inside the block."""
    disable = graph.disable_saved_tensors_hooks

    @contextmanager
    def disable_without_ours(message: str) -> Iterator[None]:
        with _taken_off(hooks), disable(message):
            yield

    graph.disable_saved_tensors_hooks = disable_without_ours  # type: ignore[assignment]
    try:
        yield
    finally:
        graph.disable_saved_tensors_hooks = disable


@contextmanager
def _taken_off(hooks: saved_tensors_hooks) -> Iterator[None]:
    ignore_is_tracing = False
    top: Any = torch._C._autograd._top_saved_tensors_default_hooks(ignore_is_tracing)
    if top is None or top[0] != hooks.pack_hook:
        yield  # hooks of the user's own lie on top: the transform refuses them, as it would without us
        return
    hooks.__exit__(None, None, None)
    try:
        yield
    finally:
        hooks.__enter__()
