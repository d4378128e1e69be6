"""Parameters, shards and gathered ones, that take the values which code gives them by ``parameter.data = values``.

Averages of weights are often moved so. A ``DTensor`` takes them without a word, and keeps the values it had.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_vram.core.tensors.counted_parameter import CountedParameter
from lightning_vram.core.tensors.parameter_classes import OURS, add_parameter_class, while_plain

_GATHERED = f"{OURS}gathered"


class SettableShard(DTensor):
    """What the class of a sharded parameter is; nothing else changes."""

    @property
    def data(self) -> Tensor:
        """As of any tensor; while the parameter is gathered, that of what is gathered, which it will be."""
        gathered: Tensor | None = gathered_of(self)
        if gathered is not None:
            return gathered.data
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined, no-any-return]

    @data.setter
    def data(self, values: Tensor) -> None:
        gathered = gathered_of(self)
        set_values(self if gathered is None else gathered.data, values)

    # Copies and files are plain ones.
    def __deepcopy__(self, memo: Any) -> Any:
        return while_plain(self, DTensor, lambda: self.__deepcopy__(memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return while_plain(self, DTensor, lambda: self.__reduce_ex__(protocol))


class GatheredParameter(CountedParameter):
    """What the class of a gathered parameter is. What is written to it is counted: its shard gets it in the end.

    Its memory is FSDP2's: ``parameter.data = values`` copies into it.
    """

    @property
    def data(self) -> Tensor:
        """As of any parameter."""
        return super().data

    @data.setter
    def data(self, values: Tensor) -> None:
        set_values(self.data, values)


add_parameter_class(GatheredParameter)


def gathered_of(shard: Tensor) -> Tensor | None:
    """Return what was set by :func:`set_gathered`."""
    return vars(shard).get(_GATHERED)


def set_gathered(shard: Tensor, gathered: Tensor | None) -> None:
    """Note what code computes with in the place of ``shard``; ``None``: nothing is gathered."""
    vars(shard)[_GATHERED] = gathered


def make_settable(shards: Iterable[Tensor]) -> None:
    """Let ``shard.data = values`` write to ``shards``."""
    for shard in shards:
        if type(shard) is DTensor:
            shard.__class__ = SettableShard


@torch.no_grad()
def set_values(parameter: Tensor, values: Tensor) -> None:
    """Copy into ``parameter``, a shard or what is gathered, what it is told to be: whole, or as sharded as it is.

    Raises:
        RuntimeError: If ``values`` have another shape or dtype.
    """
    if values.shape != parameter.shape or values.dtype != parameter.dtype:
        raise RuntimeError(
            "While fsdp_offload shards a model, `parameter.data = values` needs the same shape and dtype: the "
            f"parameter has {tuple(parameter.shape)} and {parameter.dtype}, the values have {tuple(values.shape)} and "
            f"{values.dtype}."
        )
    if isinstance(parameter, DTensor) and not isinstance(values, DTensor):
        values = values.to(parameter.device)
        values = distribute_tensor(values, parameter.device_mesh, parameter.placements, src_data_rank=None)
    elif isinstance(values, DTensor) and not isinstance(parameter, DTensor):
        values = values.full_tensor()
    parameter.copy_(values)
