"""Store masks as bits, indices in small integers, and signs alone."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_vram.core.tensors.mask_bits import pack_bits, unpack_bits
from lightning_vram.private_names.torch.dispatch import FakeTensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size
_NARROW = (torch.uint8, torch.int16, torch.int32)


class Encoding(NamedTuple):
    """What was made of the elements of a storage, and how to get them back."""

    pieces: list[Tensor]
    decode: Callable[[list[Tensor]], Tensor]
    """Takes the pieces, returns the elements [n] in memory of their own."""


def can_be_read(tensor: Tensor) -> bool:
    """Whether a look at the values costs no wait for a device. NumPy writes to no other memory."""
    return tensor.device.type == "cpu"


def is_certain(flag: Tensor) -> bool:
    """Whether ``flag`` is true. Of fake tensors nothing is known that speaks against what was noted."""
    return isinstance(flag, FakeTensor) or bool(flag)


def pack_mask(mask: Tensor) -> Encoding:
    """Keep ``mask``, bool [n], as bits."""
    size = mask.numel()
    return Encoding([pack_bits(mask)], lambda pieces: _unpack(pieces[0], size, torch.bool))


def pack_two_values(numbers: Tensor) -> Encoding | None:
    """Keep ``numbers``, [n] of any dtype, as bits, if they have two values; ``None`` if they have more."""
    dtype, size = numbers.dtype, numbers.numel()
    as_integers = numbers.view(_INTEGERS[dtype.itemsize])  # -0.0 and NaN are values like others
    low, high = as_integers.aminmax()
    is_high = as_integers == high
    if can_be_read(numbers) and not is_certain((is_high | (as_integers == low)).all()):
        return None

    def decode(pieces: list[Tensor]) -> Tensor:
        bits, low, high = pieces
        return torch.where(_unpack(bits, size, torch.bool), high, low).view(dtype)

    return Encoding([pack_bits(is_high), low, high], decode)


def narrow_indices(indices: Tensor, largest: int) -> Encoding | None:
    """Keep ``indices``, [n], in the smallest integers that hold ``largest``; ``None`` if that is no smaller."""
    dtype = indices.dtype
    if can_be_read(indices):
        low, high = indices.aminmax()
        is_fake = isinstance(indices, FakeTensor)
        if not is_fake and (int(low) < 0 or int(high) > largest):
            return None  # somebody wrote there past PyTorch
    narrow = next((narrow for narrow in _NARROW if largest <= torch.iinfo(narrow).max), dtype)
    if narrow.itemsize >= dtype.itemsize:
        return None
    return Encoding([indices.to(narrow)], lambda pieces: pieces[0].to(dtype))


def pack_signs(numbers: Tensor, condition: Callable[[Tensor], Tensor]) -> Encoding:
    """Keep where ``condition`` holds. What comes back is 1 there and 0 elsewhere."""
    dtype, size = numbers.dtype, numbers.numel()
    return Encoding([pack_bits(condition(numbers))], lambda pieces: _unpack(pieces[0], size, dtype))


def _unpack(bits: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    return unpack_bits(bits, torch.empty(size, dtype=dtype, device=bits.device))
