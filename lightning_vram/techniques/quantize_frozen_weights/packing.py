"""Weights in 8 or 4 bits: a block of numbers in each row, behind the scale of these.

A number is a level times the scale. Levels of 8 bits are -127 to 127 by 127, levels of 4 bits those of NF4, at equal
shares of a normal distribution (QLoRA, Dettmers et al. 2023, https://arxiv.org/abs/2305.14314). The scale of 8 bits is
the largest magnitude of the block; of 4 bits it is that of 0.85 to 1.1 times as much whose squared error is least
(Choukroun et al. 2019, https://arxiv.org/abs/1902.06822), as those of the largest number are not all that counts. The
largest number has the last level with all of these, so what was decoded is encoded to the same bytes again.
"""

import math
from itertools import pairwise
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_vram.private_names.torch.dispatch import FakeTensor
from lightning_vram.techniques.quantize_frozen_weights.libraries import (
    Library,
    decode_by_library,
    decodes_by_library,
)

Bits = Literal[8, 4]
SCALE_BYTES = 4
_STEPS = 127
_PART = 1 << 18  # numbers that are worked on at a time, in float32, on the host
_PART_OF_DEVICES = 1 << 23  # whose kernels take a time to start
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_MIDDLES = [(low + high) / 2 for low, high in pairwise(_NF4)]
_PAIRS = [(high, low) for high in _NF4 for low in _NF4]  # the two numbers of each byte
_SHARES = (1.0, 0.85, 0.9, 0.95, 1.05, 1.1)  # below 1.16: beyond that the largest number has another level
_CELLS = 1024  # between 0 and 1, each with one level: near enough to compare errors by
_LARGEST_FIT = 2.0**15  # more than that is not in float16
_LAST_CELL = int(_CELLS / min(_SHARES)) + 2

_tables: dict[torch.device, Tensor] = {}


class Packing(NamedTuple):
    """How weights are kept.

    Args:
        bits: Of a number.
        block_size: Neighbours that share a scale; a power of two.
    """

    bits: Bits
    block_size: int

    @property
    def row_bytes(self) -> int:
        """What a block takes."""
        return self.block_size * self.bits // 8 + SCALE_BYTES

    def num_blocks(self, size: int) -> int:
        """Blocks of ``size`` numbers; the last one is filled up."""
        return -(-size // self.block_size)

    def empty(self, size: int, device: torch.device) -> Tensor:
        """Return memory for ``size`` numbers, uint8, [num_blocks, row_bytes]."""
        return torch.empty(self.num_blocks(size), self.row_bytes, dtype=torch.uint8, device=device)

    def encode(self, numbers: Tensor, into: Tensor) -> None:
        """Write numbers of any shape and floating-point dtype, some at a time, ``into`` memory on any device."""
        flat, rows = numbers.detach().reshape(-1), self._rows_at_a_time(numbers.device)
        for start in range(0, len(into), rows):
            part = flat[start * self.block_size : (start + rows) * self.block_size].float()
            part = F.pad(part, (0, -part.numel() % self.block_size)) if part.numel() % self.block_size else part
            into[start : start + rows].copy_(self._encode_blocks(part.view(-1, self.block_size)))

    def decode(self, packed: Tensor, size: int, dtype: torch.dtype, library: Library = "own") -> Tensor:
        """Return the numbers, [size]: no more than a part of them is ever there in another dtype."""
        if torch.compiler.is_compiling():
            return self._decode_blocks(packed).to(dtype).view(-1)[:size]  # in one kernel
        numbers = torch.empty(len(packed) * self.block_size, dtype=dtype, device=packed.device)
        rows, parts = self._rows_at_a_time(packed.device), numbers.view(-1, self.block_size)
        is_theirs = decodes_by_library(library, *self, packed, dtype)
        decode = decode_by_library if is_theirs else self._decode_into
        for start in range(0, len(packed), rows):
            decode(parts[start : start + rows], *self._split(packed[start : start + rows]))
        return numbers[:size]

    @classmethod
    def of(cls, shape: torch.Size, size: int) -> Self | None:
        """Return how ``size`` numbers are kept in memory of this shape; ``None`` if it is none of ours."""
        if len(shape) != 2:
            return None
        ways = [cls(bits, (shape[1] - SCALE_BYTES) * 8 // bits) for bits in (8, 4)]
        fitting = (way for way in ways if way.block_size > 0 and way.num_blocks(size) == shape[0])
        return next(fitting, None)

    def _rows_at_a_time(self, device: torch.device) -> int:
        return (_PART if device.type == "cpu" else _PART_OF_DEVICES) // self.block_size

    def _encode_blocks(self, blocks: Tensor) -> Tensor:
        scales = torch.maximum(blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True).neg_())
        scales.masked_fill_(scales.isinf(), math.nan)
        if self.bits == 4:
            scales = _fit_scales(blocks, scales)
        levels = blocks / scales.masked_fill(scales == 0, 1.0)
        if self.bits == 8:
            codes = levels.mul_(_STEPS).round_().to(torch.int8).view(torch.uint8)
        else:
            middles = torch.tensor(_MIDDLES, dtype=torch.float32, device=blocks.device)
            halves = torch.bucketize(levels, middles, out_int32=True).to(torch.uint8).view(len(blocks), -1, 2)
            codes = halves[..., 0] * 16 + halves[..., 1]
        return torch.cat([scales.view(torch.uint8), codes], 1)

    def _decode_blocks(self, rows: Tensor) -> Tensor:
        """Return the numbers of blocks in float32, [num_blocks, block_size]."""
        scales, codes = self._split(rows)
        if self.bits == 8:
            levels = codes.view(torch.int8).float().div_(_STEPS)
        else:
            levels = F.embedding(codes.int(), _pairs_for(codes)).view(len(rows), self.block_size)
        return levels.mul_(scales)

    def _decode_into(self, numbers: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Write the same numbers, rounded, into memory of blocks, [num_blocks, block_size]: in it, if it is float32."""
        levels = numbers if numbers.dtype is torch.float32 else torch.empty_like(numbers, dtype=torch.float32)
        if self.bits == 8:
            levels.copy_(codes.view(torch.int8)).div_(_STEPS)
        else:  # two numbers as one of eight bytes: a third of the time of rows of two
            pairs = _pairs_for(codes).view(torch.int64).view(-1)
            torch.index_select(pairs, 0, codes.int().view(-1), out=levels.view(torch.int64).view(-1))
        levels.mul_(scales)
        if levels is not numbers:
            numbers.copy_(levels)

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[:, :SCALE_BYTES].contiguous().view(torch.float32), rows[:, SCALE_BYTES:]


def _fit_scales(blocks: Tensor, largest: Tensor) -> Tensor:
    """Return the scales of the least squared errors, [num_blocks, 1]; a share of a magnitude is rounded to bf16."""
    parts = (blocks / largest).nan_to_num_(0.0)
    cells = torch.arange(0.5 - _LAST_CELL, _LAST_CELL, device=blocks.device) / _CELLS
    nf4, middles = (torch.tensor(each, dtype=torch.float32, device=blocks.device) for each in (_NF4, _MIDDLES))
    levels = nf4[torch.bucketize(cells, middles)]
    errors = []
    for share in _SHARES:
        numbers = parts / share
        cell = numbers.mul(_CELLS).add_(_LAST_CELL).int().view(-1)
        off = levels.index_select(0, cell).view_as(parts).sub_(numbers)
        errors.append(off.square_().sum(1).mul_(share**2))
    best = torch.stack(errors, 1).argmin(1, keepdim=True)
    scales = largest * torch.tensor(_SHARES, dtype=torch.float32, device=blocks.device)[best]
    scales = scales.bfloat16().float()  # of each dtype that weights have: the largest number decodes to the scale
    return scales.where((best > 0) & (largest < _LARGEST_FIT), largest)


def _pairs_for(codes: Tensor) -> Tensor:
    """Return the numbers of each byte, [256, 2], where ``codes`` are."""
    device = codes.device
    if device.type == "cpu" or torch.compiler.is_compiling() or type(codes) is FakeTensor:
        return torch.tensor(_PAIRS, dtype=torch.float32, device=device)
    if device not in _tables:  # else each use would wait for the device
        _tables[device] = torch.tensor(_PAIRS, dtype=torch.float32, device=device)
    return _tables[device]
