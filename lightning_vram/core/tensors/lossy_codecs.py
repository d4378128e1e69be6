"""Store floating-point numbers in fewer bits, with a bound on the error."""

import math
from typing import Literal

import torch
from torch import Tensor

LossyFormat = Literal["bf16", "fp8", "int8"]
LOSSY_FORMATS: tuple[LossyFormat, ...] = ("bf16", "fp8", "int8")
_LARGEST = {"fp8": 448.0, "int8": 127.0}


def encoded_itemsize(to: LossyFormat) -> int:
    """Return the bytes that one number takes, scales not counted."""
    return 2 if to == "bf16" else 1


def encode(numbers: Tensor, to: LossyFormat, block_size: int = 128) -> list[Tensor]:
    """Store flat, contiguous ``numbers`` in fewer bits; return the pieces for :func:`decode`: numbers, and scales.

    The error of a number ``x``, in a block of which the largest magnitude is ``m``, before it is rounded to the dtype
    of ``numbers``:

    * ``"bf16"``: at most ``|x| / 256``, or 4.6e-41 for the smallest ones. Numbers above 3.39e38 become infinite.
    * ``"fp8"`` (e4m3): at most ``|x| / 16``, or ``m / 458752`` for the smallest ones.
    * ``"int8"``: at most half a step, ``m / 254``.

    With the last two a block with ``m`` below 1.2e-38 times 448 or 127 becomes zeros. One scale per block of
    ``block_size`` neighbours keeps one large number from spoiling all others. A block that holds an infinity or NaN
    comes back as NaN as a whole: to check it would block the host, and it must not come back as a number. bf16 has no
    blocks; there infinities and NaN stay what they are.
    """
    if to == "bf16":
        return [numbers.to(torch.bfloat16)]
    block_size = max(1, min(block_size, numbers.numel()))
    missing = -numbers.numel() % block_size
    blocks = (torch.nn.functional.pad(numbers, (0, missing)) if missing else numbers).view(-1, block_size)
    dtype = torch.float64 if numbers.dtype is torch.float64 else torch.float32
    kind = torch.finfo(dtype)
    scales = _largest(blocks, dtype) / _LARGEST[to]
    # NaN for a block with an infinity: what is divided by infinity is a zero, and must not stay one.
    scales.masked_fill_(scales.isinf(), math.nan).masked_fill_(scales < kind.tiny, 1.0)
    # The largest number is decoded to itself, or a little less: not to infinity.
    scales.clamp_(max=kind.max / _LARGEST[to] * (1 - 2 * kind.eps))
    codes = blocks / scales
    if to == "int8":
        return [codes.round_().to(torch.int8), scales]
    # Seen as bytes: not every stage, device and function knows the dtype.
    return [codes.to(torch.float8_e4m3fn).view(torch.uint8), scales]


def decode(pieces: list[Tensor], to: LossyFormat, dtype: torch.dtype, size: int) -> Tensor:
    """Return the ``size`` numbers that :func:`encode` made ``pieces`` of, [size], as ``dtype``."""
    if to == "bf16":
        return pieces[0].to(dtype)
    codes, scales = pieces
    if to == "fp8":
        codes = codes.view(torch.float8_e4m3fn)
    return codes.to(scales.dtype).mul_(scales).to(dtype).view(-1)[:size]


def _largest(blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the largest magnitude in each row, [n, 1]."""
    if blocks.device.type != "cpu":
        norm: Tensor = torch.linalg.vector_norm(blocks, math.inf, 1, keepdim=True, dtype=dtype)
        return norm
    # On the CPU the norm takes a hundred times as long.
    return torch.maximum(blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True).neg_()).abs_().to(dtype)
