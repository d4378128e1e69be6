"""``parameter.data = other`` between host and device, which PyTorch allows to CUDA and refuses to other backends.

Without it ``Module.to`` makes new parameters, tied weights come apart, and FSDP2 cannot move its shards.
"""

from types import FunctionType

import torch
from support.simdevice.extension import extension

_data = torch._C.TensorBase.data
_is_compatible = torch._has_compatible_shallow_copy_type


class _Data(property):
    """To classes of tensors that look who asks for what, PyTorch's."""

    __name__ = "data"


def install() -> None:
    """Replace the property and the question that ``Module.to`` asks first."""
    torch.Tensor.data = _Data(
        _data.__get__, FunctionType(_set_data.__code__, {**globals(), "__name__": "torch._tensor"})
    )
    torch._has_compatible_shallow_copy_type = _has_compatible_shallow_copy_type


def _is_between(one: torch.Tensor, other: torch.Tensor) -> bool:
    return {one.device.type, other.device.type} == {"cpu", "sim"} and one.layout == other.layout == torch.strided


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if isinstance(value, torch.Tensor) and _is_between(tensor, value):
        extension.set_data(tensor, value)
    else:
        _data.__set__(tensor, value)


def _has_compatible_shallow_copy_type(input: torch.Tensor, from_: torch.Tensor) -> bool:  # dynamo compares signatures
    return _is_between(input, from_) or _is_compatible(input, from_)
