"""A float32 tensor that takes 8 bits for a number, and 8 for 128 neighbours: what they are multiplied by.

Numbers are fp8 (e4m3), scales powers of two: so what was read is written again to the same bits. For whoever reads it
is a float32 tensor: each operator works on a copy of its values, and what writes to it rounds to the nearest. Those who
work on a part at a time cut it. It is pickled as a plain tensor.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.tensors.lossy_codecs import encode
from lightning_vram.core.tensors.native_codecs import native_codecs
from lightning_vram.private_names.torch.operators import TO_COPY, schema_of
from lightning_vram.private_names.torch.tensors import make_wrapper
from lightning_vram.private_names.torch.trees import tree_map_only

BLOCK_SIZE = 128
_KEEPING = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class EightBitTensor(Tensor):
    """Numbers in blocks.

    Args:
        records: A block in each row, uint8: its numbers, then the exponent of their scale. Zero stands for NaN.
        shape: Of the tensor.
        is_positive: Whether numbers above zero do not become zero: they would be divided by.
    """

    records: Tensor
    is_positive: bool

    def __new__(cls, records: Tensor, shape: Sequence[int], *, is_positive: bool) -> "EightBitTensor":
        """Make a tensor that has no memory but ``records``."""
        made: EightBitTensor = make_wrapper(cls, shape, torch.float32, records.device)
        made.records, made.is_positive = records, is_positive
        return made

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Memory that it takes."""
        return self.records.nbytes

    def decode(self, wide: Tensor | None = None) -> Tensor:
        """Return the values, in memory of their own, or in that of a flat float32 tensor."""
        wide = self.records.new_empty(self.numel(), dtype=torch.float32) if wide is None else wide
        native = native_codecs(wide, self.records)
        if native is None:
            wide.copy_(self._decode())
        else:
            native.decode_eight_bit(self.records, wide)
        return wide.view(self.shape)

    def _decode(self) -> Tensor:
        codes, exponents = self.records[:, :-1].view(torch.int8), self.records[:, -1:]
        # As float16 the same bits, but for their place, are a 256th. Conversions from fp8 are slow on a CPU.
        bits = codes.to(torch.int16)
        bits = bits.bitwise_and(-0x8000).bitwise_or_(bits.bitwise_and_(0x7F).bitwise_left_shift_(7))
        scales = exponents.int().bitwise_left_shift_(23).view(torch.float32)
        scales = scales.masked_fill(exponents == 0, math.nan)
        wide = bits.view(torch.float16).float().mul_(256.0).mul_(scales)
        return wide.view(-1)[: self.numel()]

    def take_over(self, numbers: Tensor) -> None:
        """Take over values of a float32 tensor of this shape."""
        if isinstance(numbers, EightBitTensor) and numbers.records.shape == self.records.shape:
            self.records.copy_(numbers.records)
            return
        size = self.records.shape[1] - 1
        flat = decoded(numbers).detach().to(self.device, torch.float32).contiguous().view(-1)
        native = native_codecs(flat, self.records)
        if native is not None:
            native.encode_eight_bit(flat, self.records, is_positive=self.is_positive)
            return
        flat = torch.nn.functional.pad(flat, (0, self.records.shape[0] * size - flat.numel()))
        if not flat.numel():
            return
        codes, scales = encode(flat, "fp8", size, powers_of_two=True)
        if self.is_positive:
            codes = torch.maximum(codes, (flat > 0).view(codes.shape).to(torch.uint8))
        self.records[:, :-1].copy_(codes)
        exponents = scales.view(torch.int32).bitwise_right_shift(23)
        self.records[:, -1:].copy_(exponents.masked_fill_(scales.isnan(), 0))

    def cut(self, start: int, stop: int) -> "EightBitTensor":
        """Return some of the numbers, flat, over the same memory; they begin with a block, and end with one or all."""
        size = self.records.shape[1] - 1
        rows = self.records[start // size : -(-stop // size)]
        return EightBitTensor(rows, (stop - start,), is_positive=self.is_positive)

    def over(self, records: Tensor, shape: Sequence[int] | None = None) -> "EightBitTensor":
        """Return another one of as many numbers."""
        return EightBitTensor(records, self.shape if shape is None else shape, is_positive=self.is_positive)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        """Show the values."""
        return f"EightBitTensor({self.decode()!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Be a plain tensor for whoever reads the pickle."""
        return self.decode().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        """Name the tensors that this one is made of."""
        return ["records"], self.is_positive

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "EightBitTensor":
        """Make one of such."""
        return cls(inner["records"], size, is_positive=context)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Work on the values."""
        kwargs = kwargs or {}
        ours = args[0] if args and isinstance(args[0], cls) else None
        if ours is not None:
            if func in _KEEPING:
                return ours.over(ours.records)
            if func is torch.ops.aten.clone.default or (func is TO_COPY and _stays(kwargs)):
                return ours.over(ours.records.clone())
            if func is torch.ops.aten.view.default:
                return ours.over(ours.records, torch.empty(ours.shape, device="meta").view(args[1]).shape)
            if func is torch.ops.aten.copy_.default:
                ours.take_over(args[1])
                return ours
        wide_args, wide_kwargs = tree_map_only(EightBitTensor, decoded, (args, dict(kwargs)))
        result = func(*wide_args, **wide_kwargs)
        if ours is not None and schema_of(func).is_mutable and result is wide_args[0]:
            ours.take_over(result)
            return ours
        return result


def decoded(value: Any) -> Any:
    """Return the values of a tensor in 8 bit; anything else as it is."""
    return value.decode() if isinstance(value, EightBitTensor) else value


def record_bytes(count: int) -> int:
    """Bytes that so many numbers take; of more than a block, those of several are those of all."""
    size = min(BLOCK_SIZE, max(1, count))
    return -(-count // size) * (size + 1)


def eight_bit_over(
    memory: Tensor, count: int, *, is_positive: bool, shape: Sequence[int] | None = None
) -> EightBitTensor:
    """Return a tensor, flat without a shape, over ``record_bytes(count)`` bytes, or those of a part of a larger one."""
    size = BLOCK_SIZE if memory.numel() % (BLOCK_SIZE + 1) == 0 else max(1, count)
    records = memory.view(-1, size + 1)
    return EightBitTensor(records, (count,) if shape is None else shape, is_positive=is_positive)


def empty_eight_bit(shape: Sequence[int], device: torch.device | str = "cpu", *, is_positive: bool) -> EightBitTensor:
    """Return one without values."""
    count = math.prod(shape)
    memory = torch.empty(record_bytes(count), dtype=torch.uint8, device=device)
    return eight_bit_over(memory, count, is_positive=is_positive, shape=shape)


def _stays(options: Mapping[str, Any]) -> bool:
    """Whether a conversion has these numbers on the host."""
    return options.get("dtype") in (None, torch.float32) and torch.device(options.get("device") or "cpu").type == "cpu"
