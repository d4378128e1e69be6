"""Weights in 8 or 4 bits: rows of a float32 scale and the levels of a block of numbers.

8-bit levels are -127 to 127 by 127, 4-bit ones those of NF4 (QLoRA, https://arxiv.org/abs/2305.14314). The 8-bit scale
is the block's largest magnitude; the 4-bit one is 0.85 to 1.1 times that, by the least squared error (Choukroun et al.
2019, https://arxiv.org/abs/1902.06822). The largest number gets the last level with each of these scales, so
dequantized numbers are quantized to the same bytes again.
"""

import math
from functools import lru_cache, partial
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_vram.core.operators import parts_of
from lightning_vram.private_names.dispatcher import FakeTensor

Library = Literal["auto", "own", "bitsandbytes"]
MIN_BLOCK_SIZE = 32
"""Of bitsandbytes."""
_MAX_ON_HOST = 1024  # block size: bitsandbytes has no fast kernel for larger ones on the host
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def decodes_by_library(library: Library, bits: int, block_size: int, packed: Tensor, dtype: torch.dtype) -> bool:
    """Whether bitsandbytes decodes ``packed``, not if fake; ``"auto"``: where it is installed and faster."""
    if library == "own" or dtype not in _DTYPES or isinstance(packed, FakeTensor):
        return False
    if library == "bitsandbytes":
        return True
    kind = packed.device.type
    is_faster = kind == "cuda" or (kind == "cpu" and bits == 4 and block_size <= _MAX_ON_HOST)
    return is_faster and block_size >= MIN_BLOCK_SIZE and _operators() is not None


def decode_by_library(numbers: Tensor, scales: Tensor, codes: Tensor) -> None:
    """Write into ``numbers`` [num_blocks, block_size]: one kernel, in place of five passes of ours.

    ``scales`` are float32 [num_blocks, 1], ``codes`` uint8 of the width of ``numbers``, or half of it with 4 bits.
    """
    operators, block_size = _operators(), numbers.shape[1]
    settings: tuple[Any, ...] = (codes.contiguous(), scales.view(-1))  # a copy of codes: rows have scales in between
    if codes.shape[1] < block_size:
        decode = operators.dequantize_4bit
        settings += (block_size, "nf4", numbers.shape, numbers.dtype)
    else:
        decode = operators.dequantize_blockwise
        settings += (_levels(codes.device), block_size, numbers.dtype)
    if numbers.device.type == "cuda":
        decode.out(*settings, out=numbers)
    else:  # where no kernel writes to given memory
        numbers.copy_(decode(*settings))


@lru_cache
def _operators() -> Any:
    if find_spec("bitsandbytes") is not None:
        import_module("bitsandbytes")
        return torch.ops.bitsandbytes
    return None


@lru_cache
def _levels(device: torch.device) -> Tensor:
    """Return what each byte means with 8 bits, [256]."""
    return torch.arange(256, dtype=torch.uint8).view(torch.int8).float().div_(127).to(device)


Bits = Literal[8, 4]
SCALE_BYTES = 4
_STEPS = 127
_PART = 1 << 18  # numbers that are worked on at a time, in float32, on the host
_PART_OF_DEVICES = 1 << 23  # more, as launching a kernel takes time
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_MIDDLES = [(low + high) / 2 for low, high in pairwise(_NF4)]
_PAIRS = [(high, low) for high in _NF4 for low in _NF4]  # the two numbers of each byte
_SHARES = (1.0, 0.85, 0.9, 0.95, 1.05, 1.1)  # below 1.16: beyond that the largest number has another level
_ERROR_CELLS = 1 << 9  # of a table, from 0 to 1: enough to compare errors by
_LEVEL_CELLS = 1 << 13  # of a table, from 0 to 1: a number at the border of two levels is off by one cell at most
_LARGEST_FIT = 2.0**15  # more than that is not in float16

_tables: dict[torch.device, Tensor] = {}


class Packing(NamedTuple):
    """Layout of quantized weights: uint8, [num_blocks, row_bytes]."""

    bits: Bits
    block_size: int  # neighbours that share a scale; a power of two

    @property
    def row_bytes(self) -> int:
        """Bytes of a block with its scale."""
        return self.block_size * self.bits // 8 + SCALE_BYTES

    def num_blocks(self, size: int) -> int:
        """Blocks of ``size`` numbers; the last one is filled up."""
        return -(-size // self.block_size)

    def empty(self, size: int, device: torch.device) -> Tensor:
        """Return memory for ``size`` numbers, uint8, [num_blocks, row_bytes]."""
        return torch.empty(self.num_blocks(size), self.row_bytes, dtype=torch.uint8, device=device)

    def encode(self, numbers: Tensor, into: Tensor, device: torch.device | None = None) -> None:
        """Write numbers of any shape and dtype ``into`` memory; ``device`` (``None``: theirs) computes."""
        flat, device = numbers.detach().reshape(-1), device or numbers.device
        tables = _make_tables(device) if self.bits == 4 else None
        for part in parts_of(len(into), self._rows_at_a_time(device), numbers):
            some = slice(part.start * self.block_size, part.stop * self.block_size)
            self._encode_into(into[part], flat[some].to(device), tables)  # a call, so that it frees its tensors

    def decode(self, packed: Tensor, size: int, dtype: torch.dtype, library: Library = "own") -> Tensor:
        """Return the numbers, [size], decoded in parts."""
        if torch.compiler.is_compiling():
            scales, codes = self._split(packed)
            if self.bits == 8:
                levels = codes.view(torch.int8).float().div_(_STEPS)
            else:
                levels = F.embedding(codes.int(), _pairs_for(codes)).view(len(packed), self.block_size)
            return levels.mul_(scales).to(dtype).view(-1)[:size]  # in one kernel
        numbers = torch.empty(len(packed) * self.block_size, dtype=dtype, device=packed.device)
        blocks, rows = numbers.view(-1, self.block_size), self._rows_at_a_time(packed.device)
        decode = decode_by_library if decodes_by_library(library, *self, packed, dtype) else self._decode_into
        for part in parts_of(len(packed), rows, packed):
            decode(blocks[part], *self._split(packed[part]))
        return numbers[:size]

    def _rows_at_a_time(self, device: torch.device) -> int:
        return (_PART if device.type == "cpu" else _PART_OF_DEVICES) // self.block_size

    def _encode_into(self, into: Tensor, numbers: Tensor, tables: tuple[Tensor, Tensor] | None) -> None:
        numbers, missing = numbers.float(), into.shape[0] * self.block_size - numbers.numel()
        numbers = F.pad(numbers, (0, missing)) if missing else numbers  # F.pad always copies
        into.copy_(self._encode_blocks(numbers.view(-1, self.block_size), tables))

    def _encode_blocks(self, blocks: Tensor, tables: tuple[Tensor, Tensor] | None) -> Tensor:
        scales = torch.maximum(blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True).neg_())
        scales.masked_fill_(scales.isinf(), math.nan)
        if tables is not None:
            scales = _fit_scales(blocks, scales, tables[0])
        levels = blocks / scales.masked_fill(scales == 0, 1.0)
        if tables is None:
            codes = levels.mul_(_STEPS).round_().to(torch.int8).view(torch.uint8)
        else:
            halves = tables[1].index_select(0, _to_cells(levels, _LEVEL_CELLS).view(-1)).view(len(blocks), -1, 2)
            codes = halves[..., 0] * 16 + halves[..., 1]
        return torch.cat([scales.view(torch.uint8), codes], 1)

    def _decode_into(self, numbers: Tensor, scales: Tensor, codes: Tensor) -> None:
        """Write into ``numbers`` [num_blocks, block_size], of any dtype."""
        levels = numbers if numbers.dtype is torch.float32 else torch.empty_like(numbers, dtype=torch.float32)
        if self.bits == 8:
            levels.copy_(codes.view(torch.int8)).div_(_STEPS)
        else:  # two numbers as one of eight bytes: a third of the time of rows of two
            is_fake = isinstance(codes, FakeTensor)
            pairs = codes.new_empty(256, dtype=torch.int64) if is_fake else _pairs_for(codes).view(torch.int64).view(-1)
            torch.index_select(pairs, 0, codes.int().view(-1), out=levels.view(torch.int64).view(-1))
        levels.mul_(scales)
        if levels is not numbers:
            numbers.copy_(levels)

    def _split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return rows[:, :SCALE_BYTES].contiguous().view(torch.float32), rows[:, SCALE_BYTES:]


def _make_tables(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return squared errors [1 + 2 * cells, num_scales] by the ratio to the largest number, and codes by level."""
    nf4, middles, shares = map(partial(torch.tensor, dtype=torch.float32, device=device), (_NF4, _MIDDLES, _SHARES))
    parts, levels = (
        torch.arange(-num, num + 1, dtype=torch.float32, device=device).div_(num)
        for num in (_ERROR_CELLS, _LEVEL_CELLS)
    )
    errors = nf4[torch.bucketize(parts[:, None] / shares, middles)].mul_(shares).sub_(parts[:, None]).square_()
    return errors, torch.bucketize(levels, middles, out_int32=True).to(torch.uint8)


def _to_cells(numbers: Tensor, num: int) -> Tensor:
    """Return the rows of numbers from -1 to 1, which are overwritten, in a table of ``2 * num + 1`` rows."""
    return numbers.nan_to_num_(0.0).clamp_(-1, 1).mul_(num).add_(num + 0.5).int()


def _fit_scales(blocks: Tensor, largest: Tensor, errors: Tensor) -> Tensor:
    """Return the scales of the least squared errors, [num_blocks, 1]."""
    best = F.embedding_bag(_to_cells(blocks / largest, _ERROR_CELLS), errors, mode="sum").argmin(1, keepdim=True)
    scales = largest * torch.tensor(_SHARES, dtype=torch.float32, device=blocks.device)[best]
    scales = scales.bfloat16().float()  # exact in each dtype of weights: the largest number decodes to the scale
    return scales.where((best > 0) & (largest < _LARGEST_FIT), largest)


def _pairs_for(codes: Tensor) -> Tensor:
    """Return the two numbers of each byte, [256, 2], on the device of ``codes``."""
    device = codes.device
    if device.type == "cpu" or torch.compiler.is_compiling():
        return torch.tensor(_PAIRS, dtype=torch.float32, device=device)
    if device not in _tables:  # an H2D copy in each call would block
        _tables[device] = torch.tensor(_PAIRS, dtype=torch.float32, device=device)
    return _tables[device]
