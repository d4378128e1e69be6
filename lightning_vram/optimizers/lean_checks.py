"""Which parameters can be kept in 16 bits."""

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def check_parameter(parameter: nn.Parameter) -> None:
    """Refuse a parameter that cannot be converted in place, or would lose something.

    Args:
        parameter: A floating one, or one that is not initialized yet.

    Raises:
        ValueError: If it is sharded, without values, a wrapper around other tensors, or of another precision.
    """
    kind: Any = type(parameter)
    if issubclass(kind, DTensor) or isinstance(parameter.data, DTensor):
        raise ValueError(
            "Sharded parameters (FSDP2) cannot be lean: the shards are the fp32 master weights already. Give "
            "fully_shard(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)) to compute in 16 bits."
        )
    data: Any = parameter.data
    if isinstance(parameter, UninitializedParameter) or parameter.is_meta or is_traceable_wrapper_subclass(data):
        raise ValueError(
            f"A parameter of type {kind.__name__} on {parameter.device} cannot be lean: only plain tensors with values "
            "can. Initialize lazy and meta parameters first, and leave quantized ones out."
        )
    if parameter.dtype not in _DTYPES:
        raise ValueError(
            f"A parameter of shape {tuple(parameter.shape)} is {parameter.dtype}: only float32, float16 and bfloat16 "
            "parameters can be lean. Convert it first, or leave it out."
        )
