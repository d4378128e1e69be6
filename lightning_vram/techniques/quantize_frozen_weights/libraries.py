"""Kernels of bitsandbytes that decode weights: the bytes stay ours, and so do the numbers.

One kernel there takes the place of five passes over memory here. Codes lie apart from scales for it, so half a byte or
a byte for each number is copied first, some at a time.
"""

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_vram.private_names.torch.dispatch import FakeTensor

Library = Literal["auto", "own", "bitsandbytes"]
MIN_BLOCK_SIZE = 32
"""Of the library."""
_MAX_ON_HOST = 1024  # it has no fast kernel for larger ones there
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def decodes_by_library(library: Library, bits: int, block_size: int, packed: Tensor, dtype: torch.dtype) -> bool:
    """Whether bitsandbytes decodes.

    Args:
        library: ``"auto"``: where it is installed and faster, which is on CUDA, and with 4 bits on the host.
        bits: Of a number.
        block_size: Neighbours that share a scale.
        packed: What is decoded. An estimate's has no memory that kernels could read.
        dtype: Of the result.
    """
    if library == "own" or dtype not in _DTYPES or isinstance(packed, FakeTensor):
        return False
    if library == "bitsandbytes":
        return True
    kind = packed.device.type
    is_faster = kind == "cuda" or (kind == "cpu" and bits == 4 and block_size <= _MAX_ON_HOST)
    return is_faster and block_size >= MIN_BLOCK_SIZE and _is_installed()


def decode_by_library(numbers: Tensor, scales: Tensor, codes: Tensor) -> None:
    """Write the numbers of blocks into memory, [num_blocks, block_size].

    Args:
        numbers: The memory, float32, bfloat16 or float16.
        scales: Float32, [num_blocks, 1].
        codes: Those of our own, uint8: [num_blocks, block_size], or half as wide, where two numbers share a byte.
    """
    operators, block_size = _operators(), numbers.shape[1]
    settings: tuple[Any, ...] = (codes.contiguous(), scales.view(-1))
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


def why_not_installed(library: Library) -> str | None:
    """Say what to install for it; ``None`` where nothing is needed."""
    if library != "bitsandbytes" or find_spec(library) is not None:
        return None
    return "QuantizeFrozenWeights(library='bitsandbytes') needs bitsandbytes: pip install bitsandbytes."


@lru_cache
def _is_installed() -> bool:
    return find_spec("bitsandbytes") is not None


@lru_cache
def _operators() -> Any:
    import_module("bitsandbytes")
    return torch.ops.bitsandbytes


@lru_cache
def _levels(device: torch.device) -> Tensor:
    """Return what each byte means with 8 bits, [256]."""
    return torch.arange(256, dtype=torch.uint8).view(torch.int8).float().div_(127).to(device)
