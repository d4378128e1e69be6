"""Round weights to whole levels, one scale per output channel, and inputs to 256 levels of a range.

By PyTorch's own operators for fake quantization, whose gradient passes straight through what is not cut off (Jacob et
al. 2018, https://arxiv.org/abs/1712.05877).
"""

import torch
from torch import Tensor

_SMALLEST = 1e-20  # a scale: its inverse is finite
_MAX_LEVEL = 255  # of inputs
_MOMENTUM = 0.01  # of ranges, as PyTorch's moving averages have it


def weight_scale(weight: Tensor, bits: int) -> Tensor:
    """Return the float32 scale [out] of each output channel of ``weight`` [out, ...]: its largest number is a level."""
    return (weight.detach().flatten(1).abs().amax(1).float() / _limit(bits)).clamp_min(_SMALLEST)


def round_weight(weight: Tensor, bits: int) -> Tensor:
    """Return ``weight`` [out, ...] rounded to levels of ``bits`` bits, zero among them."""
    scale, limit = weight_scale(weight, bits), _limit(bits)
    zero = torch.zeros_like(scale, dtype=torch.int32)
    return torch.fake_quantize_per_channel_affine(weight, scale, zero, 0, -limit, limit)


def range_of(input: Tensor) -> Tensor:
    """Return the smallest and largest number [2] of ``input`` in float32, and zero between them."""
    low, high = torch.aminmax(input.detach())
    return torch.stack([low.clamp(max=0), high.clamp(min=0)]).float()


@torch.no_grad()
def widen(known: Tensor, input: Tensor) -> None:
    """Let the range ``known`` [2], infinite at first, follow those of inputs as a moving average."""
    seen = range_of(input)
    known.copy_(torch.where(known.isfinite(), known.lerp(seen, _MOMENTUM), seen))


def round_input(input: Tensor, known: Tensor) -> Tensor:
    """Return ``input`` rounded to 256 levels of the range ``known`` [2], and cut off at its ends."""
    low, high = known.unbind()
    scale = ((high - low) / _MAX_LEVEL).clamp_min(_SMALLEST)
    zero = (-low / scale).round().to(torch.int32)
    return torch.fake_quantize_per_tensor_affine(input, scale, zero, 0, _MAX_LEVEL)


def pack(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the levels of ``weight`` [out, ...] as bytes, two in one with 4 bits, and their scale [out]."""
    scale = weight_scale(weight, bits)
    levels = (round_weight(weight.detach(), bits).float() / _along_rows(scale, weight)).round().to(torch.int8)
    if bits == 4:
        nibbles = torch.nn.functional.pad((levels.flatten() + 8).to(torch.uint8), (0, levels.numel() % 2))
        return nibbles[::2] | nibbles[1::2] << 4, scale
    return levels, scale


def unpack(packed: Tensor, scale: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Return the weight of ``shape`` [out, ...] that :func:`pack` was given, rounded."""
    if packed.dtype is torch.uint8:
        nibbles = torch.stack([packed & 15, packed >> 4], 1).flatten()[: shape.numel()]
        packed = nibbles.to(torch.int8) - 8
    levels = packed.reshape(shape)
    return (levels.float() * _along_rows(scale, levels)).to(dtype)


def _limit(bits: int) -> int:
    return (1 << bits - 1) - 1  # the same to both sides: a rounded weight is rounded to itself


def _along_rows(scale: Tensor, weight: Tensor) -> Tensor:
    return scale.view(-1, *(1 for _ in weight.shape[1:]))
