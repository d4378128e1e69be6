"""A float32 tensor of codes: numbers of a map of 256 or 16, times the scale of their block.

So torchao and bitsandbytes keep moments: "8-bit Optimizers via Block-wise Quantization" (arXiv 2110.02861), "Memory
Efficient Optimizers with 4-bit States" (arXiv 2309.01507). Their kernels write to the memory of this one.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.core.tensors.low_bit import LowBitTensor, decoded
from lightning_vram.private_names.torch.tensors import make_wrapper


class CodeMap:
    """What codes mean.

    Args:
        values: All numbers of a block whose scale is 1, ascending, on the host: 256, or 16 for codes of 4 bits, two of
            which are in a byte, the first in its upper half. The last is 1.
        block_size: Numbers with one scale.
    """

    def __init__(self, values: Tensor, block_size: int) -> None:
        self.values, self.block_size = values, block_size

    @property
    def is_packed(self) -> bool:
        """Whether two codes are in a byte."""
        return len(self.values) == 16

    @lru_cache  # noqa: B019
    def on(self, device: torch.device) -> Tensor:
        """Return the values there, which stay: there are a few maps for the life of the process."""
        return self.values.to(device)


class MappedTensor(LowBitTensor):
    """Numbers by a map; pickled and computed with as :class:`LowBitTensor`.

    Args:
        records: Codes, uint8, flat.
        scales: Of the blocks, float32, flat.
        shape: Of the tensor.
        code_map: What codes mean.
    """

    scales: Tensor
    code_map: CodeMap

    def __new__(cls, records: Tensor, scales: Tensor, shape: Sequence[int], code_map: CodeMap) -> "MappedTensor":
        """Make a tensor that has no memory but ``records`` and ``scales``."""
        made: MappedTensor = make_wrapper(cls, shape, torch.float32, records.device)
        made.records, made.scales, made.code_map = records, scales, code_map
        made.bits, made.is_positive = 4 if code_map.is_packed else 8, bool(code_map.values[0] >= 0)
        return made

    @override
    def decode(self, wide: Tensor | None = None) -> Tensor:
        """Return the values, in memory of their own, or in that of a flat float32 tensor."""
        codes = self.records
        if self.code_map.is_packed:
            codes = torch.stack([codes >> 4, codes & 15], dim=-1)
        numbers = self.code_map.on(self.device)[codes.flatten().int()]
        numbers *= self.scales.repeat_interleave(self.code_map.block_size)[: numbers.numel()]
        return (numbers if wide is None else wide.copy_(numbers)).view(self.shape)

    @override
    def take_over(self, numbers: Tensor) -> None:
        """Take over values of a float32 tensor of this shape; what :meth:`decode` returned to the same values."""
        flat = decoded(numbers).detach().to(self.device, torch.float32).flatten()
        size, values = self.code_map.block_size, self.code_map.on(self.device)
        blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % size)).view(-1, size)
        middles = (values[1:] + values[:-1]) / 2
        scales = blocks.abs().amax(1, keepdim=True)
        codes = torch.bucketize(blocks / scales.masked_fill(scales == 0, 1), middles, out_int32=True)
        if not self.is_positive:
            # The map has 1, but not -1. Where that was nearest, decoded numbers tell a smaller scale than there was.
            guess = scales / -values[0]
            for likely in (guess, guess.nextafter(guess * 2), guess.nextafter(guess / 2)):
                others = torch.bucketize(blocks / likely.masked_fill(likely == 0, 1), middles, out_int32=True)
                is_it = (values[others] * likely == blocks).all(1, keepdim=True)
                codes, scales = torch.where(is_it, others, codes), torch.where(is_it, likely, scales)
        codes = codes.flatten()[: flat.numel()]
        self.records.copy_(codes[::2] << 4 | codes[1::2] if self.code_map.is_packed else codes)
        self.scales.copy_(scales.view(-1))

    @property
    @override
    def kind(self) -> tuple[Any, ...]:
        """What tensors have in common whose memory means the same."""
        return self.code_map, self.shape

    @override
    def each(
        self, change: Callable[[Tensor], Tensor], shape: torch.Size | None = None, stride: Any = None
    ) -> LowBitTensor:
        """Return another one of the same kind, over what becomes of its memory; of this shape, if none is given."""
        shape = self.shape if shape is None else shape
        return MappedTensor(change(self.records), change(self.scales), shape, self.code_map)

    @override
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Name the tensors that this one is made of."""
        return ["records", "scales"], self.code_map

    @classmethod
    @override
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "MappedTensor":
        """Make one of such."""
        return cls(inner["records"], inner["scales"], size, context)


def empty_mapped(like: Tensor, code_map: CodeMap) -> MappedTensor:
    """Return one of zeros, of the shape and device of a contiguous tensor."""
    count = like.numel()
    records = torch.zeros(count // 2 if code_map.is_packed else count, dtype=torch.uint8, device=like.device)
    scales = torch.zeros(-(-count // code_map.block_size), device=like.device)
    return MappedTensor(records, scales, like.shape, code_map)
