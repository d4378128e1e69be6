"""Keep a tensor for the backward by hand, as autograd would: under the saved-tensor hooks that are set."""

from typing import Any

import torch
from torch import Tensor

from lightning_vram.techniques.saved_tensor_stage import PLAIN_TYPES
from lightning_vram.techniques.versions import is_strided, version_counter, version_of


class SavedOutput:
    """A tensor that some backward will ask for, offloaded or compressed by whoever does that to saved tensors.

    Args:
        tensor: A tensor without gradients, usually an alias of the one it is about.
    """

    def __init__(self, tensor: Tensor) -> None:
        is_plain = type(tensor) in PLAIN_TYPES and is_strided(tensor)
        self._counter = version_counter(tensor) if is_plain else tensor
        self._version = version_of(tensor)
        self._node: Any = _Save.apply(torch.empty(0, requires_grad=True), tensor).grad_fn  # type: ignore[no-untyped-call]

    def give(self) -> Tensor | None:
        """Return the tensor, each time it is asked; ``None`` if it was overwritten since."""
        if version_of(self._counter) != self._version:
            return None
        (tensor,) = self._node.saved_tensors
        return tensor  # type: ignore[no-any-return]


class _Save(torch.autograd.Function):
    """Does nothing but to save."""

    @staticmethod
    def forward(ctx: Any, dummy: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing depends on it")
