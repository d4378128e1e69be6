"""Tensors that belong to an optimizer without being its state, so that they are counted with it."""

from collections.abc import Callable, Iterable
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

_kept: WeakKeyDictionary[Optimizer, Callable[[], Iterable[Tensor]]] = WeakKeyDictionary()


def register_optimizer_tensors(optimizer: Optimizer, read: Callable[[], Iterable[Tensor]]) -> None:
    """Tell that ``optimizer`` works with tensors that are in none of its attributes, such as weights in float32.

    Args:
        optimizer: Is not kept alive.
        read: Returns them, now. Must not hold the optimizer.
    """
    _kept[optimizer] = read


def forget_optimizer_tensors(optimizer: Optimizer) -> None:
    """Take that back. An optimizer that nothing was told of is left alone."""
    _kept.pop(optimizer, None)


def optimizer_tensors(optimizer: Optimizer) -> Iterable[Tensor]:
    """The tensors that were told of."""
    read = _kept.get(optimizer)
    return () if read is None else read()
