"""Tensors that autograd saves before the operator has written them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from lightning_vram.core.tensors.parameter_classes import PARAMETER_CLASSES
from lightning_vram.private_names.torch.tensors import is_view


class _Saving(threading.local):
    tensor: Tensor | None = None


_saving = _Saving()


@contextmanager
def saving(tensor: Tensor) -> Iterator[None]:
    """Let stages know inside the block that autograd is saving ``tensor``: see :func:`is_unfinished`."""
    _saving.tensor = tensor if may_be_unfinished(tensor) else None
    try:
        yield
    finally:
        _saving.tensor = None


def is_unfinished(tensor: Tensor) -> bool:
    """Whether autograd is saving ``tensor`` at this moment, for an operator that may not have written it yet."""
    return _saving.tensor is tensor


def may_be_unfinished(tensor: Tensor) -> bool:
    """Whether an operator that saves ``tensor`` may write it only afterwards.

    ``rrelu`` saves the noise that its kernel is going to draw: a copy made at once would hold uninitialised memory, and
    a recomputation that ends with the last save would end before the noise is drawn. An operator can only do so with a
    tensor that needs no gradient and is no view. It has finished when the next one saves something: each makes its
    graph node before it saves.
    """
    return not tensor.requires_grad and type(tensor) not in PARAMETER_CLASSES and not is_view(tensor)
