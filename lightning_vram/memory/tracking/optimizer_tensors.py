"""Tensors that belong to an optimizer without being its state, so that they are counted with it."""

from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

_kept: WeakKeyDictionary[Optimizer, Callable[[], Iterable[Tensor]]] = WeakKeyDictionary()


def register_optimizer_tensors(optimizer: Optimizer, read: Callable[[], Iterable[Tensor]]) -> None:
    """Count tensors that are in no attribute of an optimizer, which ``read`` must not hold, such as fp32 weights."""
    _kept[optimizer] = read


def forget_optimizer_tensors(optimizer: Optimizer) -> None:
    """Undo :func:`register_optimizer_tensors`, if it was called."""
    _kept.pop(optimizer, None)


def optimizer_tensors(optimizer: Optimizer) -> Iterable[Tensor]:
    """Return the tensors that were registered."""
    read = _kept.get(optimizer)
    return () if read is None else read()
