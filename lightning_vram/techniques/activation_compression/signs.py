"""Recognize that ReLU is saving its own result, of which its backward needs no more than the signs.

ReLU keeps its result, and so does the convolution behind it, of which the values are needed: the same tensor comes
twice. It is ReLU's own save if and only if the node of the graph that made the tensor has not got its saved result
yet: that lasts from the moment the node is made to the end of this very save, and nobody else's code runs in between.
What is computed without a graph, or in a ``torch.autograd.Function``, has no such node. A save that failed with an
error that somebody caught leaves such a node behind for good: so the operator must have been the last activation to
run, with the hooks of the stage that is asked set, and not have been asked about.

Where what follows saves the values as well, the signs are kept in vain: that is learned from run to run. A wrong guess
costs bytes, as many as plain autograd would have kept, and never a gradient.
"""

import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_vram.core.tensors.by_storage import ByStorage
from lightning_vram.core.tensors.versions import version_of
from lightning_vram.private_names.torch.autograd import has_own_result, innermost_hooks
from lightning_vram.private_names.torch.dispatch import without_dispatch
from lightning_vram.private_names.torch.tensors import is_view

# By type of the node: what its backward asks of the saved result, NaN included.
#   relu:         threshold_backward(grad, result, 0)         -> 0 where result <= 0
#   leaky_relu_:  leaky_relu_backward(grad, result, slope)    -> grad where result > 0
_Condition = Callable[[Tensor], Tensor]


@cache
def _find_nodes() -> dict[type, _Condition]:
    with torch.inference_mode(mode=False), torch.enable_grad(), without_dispatch():  # once per process, seen by nobody
        zero = torch.zeros(1, device="cpu", requires_grad=True)
        relu, leaky_relu = F.relu(zero).grad_fn, F.leaky_relu_(zero * 1).grad_fn
    assert relu is not None
    assert leaky_relu is not None
    return {type(relu): lambda result: (result <= 0).logical_not_(), type(leaky_relu): lambda result: result > 0}


class NewActivation:
    """Knows the result that an activation is about to save."""

    def __init__(self) -> None:
        _find_nodes()  # now: later a mode and hooks are set
        self._result: weakref.ref[torch.UntypedStorage] | None = None

    def note(self, result: Tensor, pack: Callable[[Tensor], Any]) -> None:
        """Note ``result``, just made, if autograd will call ``pack`` for it."""
        hooks = innermost_hooks()
        is_ours = hooks is not None and hooks[0] == pack
        self._result = weakref.ref(result.untyped_storage()) if is_ours else None

    def clear(self) -> None:
        """Forget it."""
        self._result = None

    def find_condition(self, tensor: Tensor) -> _Condition | None:
        """Return how to encode ``tensor`` if the noted activation is saving it for the first time, else ``None``.

        A function of the values: ``True`` where the backward must find a positive number, ``False`` where zero.
        """
        result = self._result() if self._result is not None else None
        if result is None or result is not tensor.untyped_storage():
            return None
        self._result = None
        if is_view(tensor):  # an activation that overwrites a view has another node in front of its own
            return None
        node = tensor.grad_fn
        condition = _find_nodes().get(type(node))
        return condition if condition is not None and not has_own_result(node) else None


_Place = tuple[int, torch.Size]  # number of the save of signs in a run, and its shape


class LearnedSigns:
    """Remembers, from run to run, the places where the signs were given up."""

    def __init__(self) -> None:
        self._in_vain: set[_Place] = set()
        self._now_in_vain: set[_Place] = set()
        self._asked: ByStorage[tuple[int, _Place]] = ByStorage()  # of this run: version and place
        self._num_saves = 0

    def was_asked(self, tensor: Tensor) -> bool:
        """Whether the signs of ``tensor``, as it is now, were wanted before: that save failed, and this is another."""
        return self._find(tensor) is not None

    def is_worth_it(self, tensor: Tensor) -> bool:
        """Whether to keep the signs of ``tensor``, which an activation is saving; to be asked once for each."""
        self._num_saves += 1
        place = self._num_saves, tensor.shape
        self._asked.note(tensor, (version_of(tensor), place))
        return place not in self._in_vain

    def note_values(self, tensor: Tensor) -> None:
        """Note that somebody saves ``tensor``, and wants its values."""
        place = self._find(tensor)
        if place is not None:
            self._now_in_vain.add(place)

    def end_run(self) -> None:
        """Use what was learned from now on."""
        self._in_vain, self._now_in_vain = self._now_in_vain, set()
        self._asked.clear()
        self._num_saves = 0

    def _find(self, tensor: Tensor) -> _Place | None:
        asked = self._asked.find(tensor)
        return asked[1] if asked is not None and asked[0] == version_of(tensor) else None
