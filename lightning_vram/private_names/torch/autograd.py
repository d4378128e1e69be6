"""Autograd: the backward that runs, what nodes save, hooks; transforms and tracers."""

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from operator import methodcaller
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import _StopRecomputationError as StopRecomputation
from torch.utils.checkpoint import checkpoint

from lightning_vram.private_names.torch.trees import tensors_in

__all__ = ["StopRecomputation"]

ENGINE = (torch.autograd, "_engine_run_backward")
"""Where the function is through which all backwards pass."""
current_graph_task_id: Callable[[], int] = torch._C._current_graph_task_id
"""Return which backward runs in this thread; -1 for none."""

current_graph_group: Callable[[], Any] = torch._C._get_graph_exec_group
"""Return the ``GraphExecGroup`` that this thread is in, whose backwards count as one; ``None`` outside."""

retains_graph: Callable[[], bool] = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", lambda: True)
"""Return whether the backward that runs in this thread retains its graph, so that another one may follow."""

make_saved_tensor: Callable[..., Any] | None = getattr(torch._C._autograd, "_make_saved_tensor", None)
"""Save a tensor, ``is_output`` of the node or not; returns what has ``unpack``."""

num_nodes: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Return how many nodes of the graph were made in this thread: one more for each operator that has a gradient."""
number_of: Callable[[Any], int] = methodcaller("_sequence_nr")
"""Return the number of a node of the graph in its thread, above those of all that it comes from."""


def may_stop_early() -> bool:
    """Whether second runs may end with the last tensor that is needed, by ``set_checkpoint_early_stop``."""
    return getattr(torch.utils.checkpoint, "_enable_checkpoint_early_stop", None) is not False


RunBackward = Callable[..., Any]
SavedTensorHooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
"""What packs and what unpacks."""

_RUN_BACKWARD = "_engine_run_backward"  # where torch.autograd.backward and grad meet


def engine_run_backward() -> RunBackward | None:
    """Return what ``torch.autograd.backward`` and ``grad`` call; ``None`` if there is no such thing."""
    return getattr(torch.autograd, _RUN_BACKWARD, None)


def replace_run_backward(run: RunBackward) -> None:
    """Let ``torch.autograd.backward`` and ``grad`` call ``run``."""
    setattr(torch.autograd, _RUN_BACKWARD, run)


def has_own_result(node: Any) -> bool:
    """Whether a node of the graph has its result, or may have it; not while it is saving it."""
    saved = getattr(node, "_raw_saved_result", None)
    if saved is None or not hasattr(saved, "data") or not hasattr(saved, "unpack_hook"):
        return True
    if saved.data is not None or saved.unpack_hook is not None:
        return True  # somebody else saves it
    try:
        return node._saved_result is not None
    except RuntimeError:  # it had its result, and a backward has freed it
        return True


def saved_tensors_of(node: Any) -> Iterator[Tensor]:
    """Yield what a node of the graph has saved for a backward; nothing once one has freed it."""
    with suppress(RuntimeError):  # it is freed
        for name in dir(node):
            if name.startswith("_saved_"):
                yield from tensors_in(getattr(node, name))
        yield from tensors_in(getattr(node, "saved_tensors", ()))  # of a function written in Python


def innermost_hooks() -> SavedTensorHooks | None:
    """Return the saved-tensor hooks that autograd would call now."""
    ignore_is_tracing = False
    top: SavedTensorHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(ignore_is_tracing)
    return top


def push_hooks(hooks: SavedTensorHooks) -> None:
    """Set saved-tensor hooks, inside of all others."""
    torch._C._autograd._push_saved_tensors_default_hooks(*hooks)


pop_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
"""Take the innermost saved-tensor hooks off."""


# From 2.15 on a selective checkpoint of a user's, within saved-tensor hooks of ours, warns that a later version will
# hand them what it keeps. That is for us to follow: the user has set no hooks.
_WARNING = ("ignore", re.compile("A saved_tensors_hooks context", re.IGNORECASE), FutureWarning, None, 0)
_MAY_WARN = "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters


def hide_warning_of_hooks() -> None:
    """Prevent the warning about hooks that we set; to be called before."""
    if _MAY_WARN and _WARNING not in warnings.filters:  # each new filter lets all other warnings be shown once more
        warnings.filterwarnings("ignore", "A saved_tensors_hooks context", FutureWarning)


may_set_hooks: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
"""Whether saved-tensor hooks are allowed here."""


def is_in_transform() -> bool:
    """Whether a transform of ``torch.func`` is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None


is_tracing: Callable[[], bool] = torch._C._is_tracing
"""Whether ``torch.jit.trace`` is at work."""


def is_in_forward_ad() -> bool:
    """Whether derivatives are made in forward mode."""
    return forward_ad._current_level >= 0


@contextmanager
def outside_of_vmap() -> Iterator[None]:
    """Leave the levels of ``autograd.grad(is_grads_batched=True)``, in which nothing random may be drawn."""
    depth = torch._C._vmapmode_increment_nesting() - 1
    torch._C._vmapmode_decrement_nesting()
    for _ in range(depth):
        torch._C._vmapmode_decrement_nesting()
    try:
        yield
    finally:
        for _ in range(depth):
            torch._C._vmapmode_increment_nesting()
