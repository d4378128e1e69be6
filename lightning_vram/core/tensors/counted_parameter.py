"""A parameter that counts writes through ``parameter.data``, too, which autograd does not."""

from typing import Any

import torch
from torch import Tensor, nn

from lightning_vram.core.tensors.parameter_classes import OURS, add_parameter_class, while_plain
from lightning_vram.core.tensors.versions import alias
from lightning_vram.private_names.torch.tensors import num_writes

_HANDED_OUT = f"{OURS}handed_out"
_NUM_SET = f"{OURS}num_set"


class CountedParameter(nn.Parameter):
    """The class of a parameter while it counts writes through ``.data``: averages, clipping, normalisation."""

    @property
    def data(self) -> Tensor:
        """As of any parameter; all tensors that it returns share one count of writes."""
        known = vars(self)
        if _HANDED_OUT not in known:
            known[_HANDED_OUT] = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return alias(known[_HANDED_OUT])

    @data.setter
    def data(self, values: Tensor) -> None:
        known = vars(self)
        known[_NUM_SET] = count_writes(self) - num_writes(self) + 1
        known.pop(_HANDED_OUT, None)
        torch.Tensor.data.__set__(self, values)  # type: ignore[attr-defined]

    # Copies and files are plain ones.
    def __deepcopy__(self, memo: Any) -> Any:
        return while_plain(self, nn.Parameter, lambda: self.__deepcopy__(memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return while_plain(self, nn.Parameter, lambda: self.__reduce_ex__(protocol))


add_parameter_class(CountedParameter)


def count_writes(parameter: nn.Parameter) -> int:
    """Return how often a counted parameter was written, since it is counted."""
    known = vars(parameter)
    handed_out: Tensor | None = known.get(_HANDED_OUT)
    num_set: int = known.get(_NUM_SET, 0)
    return num_writes(parameter) + num_set + (0 if handed_out is None else num_writes(handed_out))


def count(parameter: nn.Parameter) -> None:
    """Begin to count; a parameter of another class stays what it is."""
    if type(parameter) is nn.Parameter:
        parameter.__class__ = CountedParameter


def stop_counting(parameter: nn.Parameter) -> None:
    """Let a parameter be an ordinary one again, if it is counted."""
    if type(parameter) is CountedParameter:
        parameter.__class__ = nn.Parameter  # type: ignore[assignment]
        for key in (_HANDED_OUT, _NUM_SET):
            vars(parameter).pop(key, None)
