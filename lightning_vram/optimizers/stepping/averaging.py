"""Move an average of weights (EMA, SWA) with the arithmetic of its own class, but in parts, and towards any tensors."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.optim.swa_utils import AveragedModel

Tensors = tuple[Iterable[Tensor], Iterable[Tensor]]
"""Parameters and buffers."""


def move_average(average: AveragedModel, number: Tensor, ours: Tensors, theirs: Tensors) -> None:
    """Have ``update_parameters`` of its class move a part of an average.

    Args:
        average: The whole. Its count stays.
        number: How many were averaged before.
        ours: Of the average.
        theirs: What to move them towards: as many, in the same order.
    """
    parameters, buffers = map(list, ours)
    if not parameters and not average.use_buffers:  # it would look for the kind of the first
        for own, their in zip(buffers, theirs[1], strict=True):
            own.detach().copy_(their)
    elif parameters or buffers:
        update: Any = type(average).update_parameters
        update(_Part(average, number, _tensors(parameters, buffers)), _tensors(*theirs))


def _tensors(parameters: Iterable[Tensor], buffers: Iterable[Tensor]) -> Any:
    """Return some tensors as ``AveragedModel`` sees a module."""
    return SimpleNamespace(parameters=[*parameters].__iter__, buffers=[*buffers].__iter__)


class _Part:
    """A part of an average, as a method of ``AveragedModel`` sees itself."""

    def __init__(self, average: AveragedModel, number: Tensor, tensors: Any) -> None:
        self._average = average
        self.module, self.n_averaged, self.parameters = tensors, number.clone(), tensors.parameters

    def __getattr__(self, name: str) -> Any:
        """All else is what it is of the whole."""
        return getattr(self._average, name)
