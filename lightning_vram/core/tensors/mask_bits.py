"""Store numbers in fewer bits: masks, lossy codecs, fp32 cut to 16 bits, and low-bit tensors."""

import torch
from torch import Tensor


def pack_bits(mask: Tensor) -> Tensor:
    """Return the elements of ``mask`` that are not zero as bits: ``uint8`` of shape ``[ceil(mask.numel() / 8)]``."""
    flags = (mask if mask.dtype is torch.bool else mask != 0).reshape(-1)
    missing = -flags.numel() % 8
    if missing:
        flags = torch.cat([flags, flags.new_zeros(missing)])
    # Chosen, not multiplied: a bool seen through a view may be any byte but zero.
    return torch.where(flags.view(-1, 8), _weights(mask.device), 0).sum(1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, like: Tensor) -> Tensor:
    """Write the mask back into ``like``, whose shape, strides and dtype are those of the original, and return it.

    Elements are counted in the order of indices, not of memory, so any strides come back.
    """
    flags = bits.unsqueeze(1).bitwise_and(_weights(bits.device)).ne_(0).view(-1)[: like.numel()]
    return like.copy_(flags.view(like.shape))


def _weights(device: torch.device) -> Tensor:
    return torch.bitwise_left_shift(1, torch.arange(8, dtype=torch.uint8, device=device))  # made there: no copy to it
