"""Cut fp32 numbers to 16 bits: with the remainder saved, or rounded without a bias."""

import math
from functools import cache

import torch
from torch import Tensor

from lightning_vram.core.tensors.native_codecs import native_codecs
from lightning_vram.private_names.torch.dispatch import FakeTensor, without_dispatch

_HALF = 0x8000
_STRIDE = 40503  # the golden ratio of 2^16: multiples of it are spread over all of its numbers
_INVERSE = pow(_STRIDE, -1, 2**16)
_ROW = 2**16 + 2**19  # places that begin anywhere, and are as many as are rounded at once on the host
_UPPER = -0x10000  # the mask of the sixteen bits that bf16 has in common with fp32


def split_(numbers: Tensor, lower: Tensor) -> None:
    """Round fp32 ``numbers`` to the nearest bf16, half away from zero, and save the lower half in ``lower`` (int16).

    A conversion to bf16 rounds halves to the even neighbour: 65537 numbers to each even one, which is one more than the
    lower half can distinguish. Here 65536 go to each. So both differ in a half next to an even number, one number of
    131072. A conversion to bf16 does not change the result.
    """
    bits = _regular_bits(numbers)
    lower.copy_(bits)  # a narrowing copy keeps the lower half
    bits.add_(_HALF).bitwise_and_(_UPPER)


def join_(numbers: Tensor, lower: Tensor) -> None:
    """Undo :func:`split_` in ``numbers``, bit-exactly; NaNs come back in their usual pattern.

    Numbers that were written since move by half a unit in the last place of bf16 at most, NaNs not at all, and zeros
    stay zeros: so what was split from numbers below 2^-134 is lost.
    """
    is_nonzero = numbers.bfloat16().view(torch.int16).bitwise_and_(0x7FFF).ne_(0)
    own = is_nonzero.mul_(lower)
    bits = numbers.view(torch.int32).add_(own)
    bits.sub_(own.mul_(numbers.isnan()))  # beyond infinity


def compensate_(numbers: Tensor, compensation: Tensor) -> Tensor:
    """Return fp32 ``numbers``, which are overwritten, as bf16; ``compensation`` (bf16) gets the rest.

    The rest is at most half a unit in the last place. A sum of two such numbers comes out unchanged, except for the
    sign of a zero. Numbers too large for bf16 become infinite.
    """
    nearest = numbers.bfloat16()
    compensation.copy_(numbers.sub_(nearest).nan_to_num_(0.0, 0.0, 0.0))  # infinity less infinity
    # The compensation may have been rounded up to exactly half a unit, and then the sum has another nearest number.
    numbers.copy_(compensation).add_(nearest)
    nearest.copy_(numbers)
    compensation.copy_(numbers.sub_(nearest).nan_to_num_(0.0, 0.0, 0.0))
    return nearest


def add_compensation_(numbers: Tensor, compensation: Tensor) -> None:
    """Undo :func:`compensate_` in ``numbers``.

    A compensation of more than half a unit in the last place of its number is not its own: the number was written
    since, and is right as it is. Zeros and infinities have none.
    """
    sums = compensation.float().add_(numbers)
    is_own = sums.bfloat16().view(torch.int16) == numbers.bfloat16().view(torch.int16)
    torch.where(is_own, sums, numbers, out=numbers)


def round_randomly_(numbers: Tensor, generator: torch.Generator) -> None:
    """Round fp32 ``numbers`` stochastically to bf16, in place: to each neighbour with the probability of its closeness.

    So small updates are right on average, where rounding to the nearest loses all of them. What a conversion to bf16
    does not change, infinities among it, stays the same. ``generator`` is on the same device.
    """
    bits = _regular_bits(numbers)
    draws = torch.empty((bits.numel() + 3) // 4, dtype=torch.int64, device=bits.device)
    draws.random_(-(2**63), None, generator=generator)  # each holds four draws of sixteen bits
    noise = draws.view(torch.int16)[: bits.numel()].view(bits.shape)
    bits.add_(noise).add_(_HALF).bitwise_and_(_UPPER)  # the noise is signed: together uniform in 0 ... 0xffff


def rounded_by_place(numbers: Tensor, first: int, seed: int, kept: Tensor | None = None) -> Tensor:
    """Round to bf16 with draws that follow from a 16-bit ``seed`` and each place; ``numbers`` are overwritten.

    So it does not matter in which parts numbers are rounded. Each number has another draw with each seed, as good as
    independent; those of neighbours are evenly spread. ``first`` is the place of the first number, ``kept`` bf16 memory
    for the result.
    """
    kept = torch.empty_like(numbers, dtype=torch.bfloat16) if kept is None else kept
    # Draws are place * stride + seed, in 16 bit: a row that comes again after 65536, and begins elsewhere by the seed.
    start = (first + seed * _INVERSE) & 0xFFFF
    native = native_codecs(numbers, kept)
    if native is not None:
        native.round_by_place(numbers, draw_of(first, seed), kept)
        return kept
    _regular_bits(numbers).add_(_draws(numbers, start)).bitwise_and_(_UPPER)
    return kept.copy_(numbers)  # which changes none, and is faster than to take the upper halves


def draw_of(place: int, seed: int) -> int:
    """Return the draw of 16 bits of :func:`rounded_by_place` for a place."""
    return (place * _STRIDE + seed) & 0xFFFF


def _draws(numbers: Tensor, start: int) -> Tensor:
    stop = start + numbers.numel()
    if numbers.device.type != "cpu" or isinstance(numbers, FakeTensor) or stop > _ROW:
        return _make_draws(start, stop, numbers.device)
    return _row_on_host()[start:stop]


@cache
def _row_on_host() -> Tensor:
    with without_dispatch():  # it stays, and is nobody's
        return _make_draws(0, _ROW, torch.device("cpu"))


def _make_draws(start: int, stop: int, device: torch.device) -> Tensor:
    places = torch.arange(start, stop, dtype=torch.int32, device=device)
    return places.mul_(_STRIDE).bitwise_and_(0xFFFF)


def _regular_bits(numbers: Tensor) -> Tensor:
    """Return the patterns, NaNs in the usual one: CUDA's would overflow to zero, others end as infinity."""
    return numbers.nan_to_num_(math.nan, math.inf, -math.inf).view(torch.int32)
