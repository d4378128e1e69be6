"""Save a tensor for backward by hand, under the saved-tensor hooks that are set."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.tensors.parameter_classes import PLAIN_TYPES
from lightning_vram.core.tensors.versions import is_strided, version_counter, version_of
from lightning_vram.private_names.torch.autograd import make_saved_tensor


def save(tensor: Tensor) -> Callable[[], Tensor]:
    """Save ``tensor`` as a graph node does, under the hooks that are set now; return what gives it back.

    It raises ``RuntimeError`` if the tensor was overwritten since.
    """
    if make_saved_tensor is not None:
        is_output = False
        unpack: Callable[[], Tensor] = make_saved_tensor(tensor, is_output).unpack
        return unpack
    # The output, not its node: a node that no tensor holds gives up what it saved.
    return partial(_read, _Save.apply(torch.empty(0, requires_grad=True), (tensor,)))  # type: ignore[no-untyped-call]


class SavedOutput:
    """A tensor that some backward will ask for, offloaded or compressed by the stages around it.

    ``tensor`` has no gradient, and usually is an alias; ``others`` are tensors on its memory with version counters of
    their own.
    """

    def __init__(self, tensor: Tensor, others: Sequence[Tensor] = ()) -> None:
        self._counters = [
            (version_counter(one) if type(one) in PLAIN_TYPES and is_strided(one) else one, version_of(one))
            for one in (tensor, *others)
        ]
        self._read = save(tensor)

    def give(self) -> Tensor | None:
        """Return the tensor, as often as it is called; ``None`` if it was overwritten since."""
        if any(version_of(counter) != version for counter, version in self._counters):
            return None
        return self._read()


def _read(output: Tensor) -> Tensor:
    node: Any = output.grad_fn
    (tensor,) = node.saved_tensors
    return tensor  # type: ignore[no-any-return]


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dummy: Tensor, tensors: tuple[Tensor]) -> Tensor:
        ctx.save_for_backward(*tensors)  # inside of a tuple they are no inputs of the node, and keep their own past
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing depends on it")
