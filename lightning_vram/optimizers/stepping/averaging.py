"""Update a part of an average of weights (EMA, SWA)."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from torch.optim.swa_utils import AveragedModel

Tensors = tuple[Iterable[Tensor], Iterable[Tensor]]  # parameters and buffers


def move_average(average: AveragedModel, number: Tensor, ours: Tensors, theirs: Tensors) -> None:
    """Update ``ours``, a part of an average, towards ``theirs`` by its own ``update_parameters``.

    ``number`` models were averaged before; the count of the average is unchanged.
    """
    parameters, buffers = map(list, ours)
    if not parameters and not average.use_buffers:  # it would read the dtype of the first parameter
        for own, their in zip(buffers, theirs[1], strict=True):
            own.detach().copy_(their)
    elif parameters or buffers:
        update: Any = type(average).update_parameters
        update(_Part(average, number, _tensors(parameters, buffers)), _tensors(*theirs))


def _tensors(parameters: Iterable[Tensor], buffers: Iterable[Tensor]) -> Any:
    """Return tensors in the form of a module."""
    return SimpleNamespace(parameters=[*parameters].__iter__, buffers=[*buffers].__iter__)


class _Part:
    """The ``self`` of ``update_parameters``: a part of an average."""

    def __init__(self, average: AveragedModel, number: Tensor, tensors: Any) -> None:
        self._average = average
        self.module, self.n_averaged, self.parameters = tensors, number.clone(), tensors.parameters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._average, name)
