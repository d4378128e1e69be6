"""Float32 tensors of 8 or 4 bits per number."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from lightning_vram.core.tensors.layout import dense_stride, flat_as_stored, stored_like
from lightning_vram.core.tensors.native_codecs import native_codecs
from lightning_vram.private_names.torch.operators import TO_COPY, schema_of
from lightning_vram.private_names.torch.tensors import make_wrapper
from lightning_vram.private_names.torch.trees import tree_map_only

Bits = Literal[8, 4]
BLOCK_SIZE = 128
_SCALE_BYTES = 4
_KEEPING = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class LowBitTensor(Tensor):
    """A float32 tensor of 8 or 4 bits per number, and 32 for each block of 128 neighbours: its largest number.

    A number is a square: the largest one of its block times (n / 128)^2 with the sign of n, -127 <= n <= 128, or in 4
    bits (n / 8)^2, -7 <= n <= 8; if it ``is_positive`` (a divisor) times (n / 256)^2, 1 <= n <= 256, or (n / 16)^2, and
    never zero. So roots, by which Adam divides, are at even distances. As the largest number of a block is exact, all
    others follow it where it decays by less than half a distance; and what was read is written again to the same bits.

    Blocks of 128 and no zero for divisors are those of Li, Chen and Zhu, "Memory Efficient Optimizers with 4-bit
    States" (2023); roots those of "FlashOptim" (arXiv 2602.23349).

    Readers see a float32 tensor: each operator works on a copy of its values, and writes round to the nearest. Code
    that works on a part at a time cuts it. It is pickled as a plain tensor on the host.

    ``records`` has a block in each row, uint8: its numbers, then the float32 scale, which is NaN if one of them was NaN
    or infinite. ``stride`` is that of a dense tensor: blocks are of numbers as they would be in memory.
    """

    records: Tensor
    bits: Bits
    is_positive: bool

    def __new__(
        cls,
        records: Tensor,
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
        *,
        bits: Bits,
        is_positive: bool,
    ) -> "LowBitTensor":
        """Make a tensor that has no memory but ``records``."""
        made: LowBitTensor = make_wrapper(cls, shape, dtype=torch.float32, device=records.device, strides=stride)
        made.records, made.bits, made.is_positive = records, bits, is_positive
        return made

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        """Bytes of its memory."""
        names, _ = self.__tensor_flatten__()
        return sum(getattr(self, name).nbytes for name in names)

    def decode(self, wide: Tensor | None = None) -> Tensor:
        """Return the values, in new memory, or in that of a flat float32 tensor."""
        wide = self.records.new_empty(self.numel(), dtype=torch.float32) if wide is None else wide
        native = native_codecs(wide, self.records)
        if native is None:
            wide.copy_(self._decode())
        else:
            native.decode_low_bit(self.records, wide, self.bits, is_positive=self.is_positive)
        return wide.as_strided(self.shape, self.stride())

    def _decode(self) -> Tensor:
        codes, scales = self.records[:, :-_SCALE_BYTES], self.records[:, -_SCALE_BYTES:]
        if self.bits == 4:  # two neighbours in a byte, the first one in its lower half
            pairs = codes.to(torch.int16)
            codes = pairs.bitwise_or_(pairs.bitwise_left_shift(4)).bitwise_and_(0x0F0F).view(torch.uint8)
        numbers = codes.float()
        if self.is_positive:
            numbers.add_(1).mul_(0.5**self.bits).square_()
        else:
            numbers.sub_(2 ** (self.bits - 1) - 1).mul_(2 * 0.5**self.bits)
            numbers.mul_(numbers.abs())
        numbers.mul_(scales.clone(memory_format=torch.contiguous_format).view(torch.float32))  # aligned
        return numbers.view(-1)[: self.numel()]

    def take_over(self, numbers: Tensor) -> None:
        """Set the values from a float32 tensor of this shape."""
        if isinstance(numbers, LowBitTensor) and numbers.kind == self.kind:
            self.records.copy_(numbers.records)
            return
        size = (self.records.shape[1] - _SCALE_BYTES) * 8 // self.bits
        flat = flat_as_stored(stored_like(decoded(numbers).detach().to(self.device, torch.float32), self))
        native = native_codecs(flat, self.records)
        if native is not None:
            native.encode_low_bit(flat, self.records, self.bits, is_positive=self.is_positive)
            return
        missing = self.records.shape[0] * size - flat.numel()
        blocks = (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, size)
        if not blocks.numel():
            return
        # Of the largest magnitude in each row, with its sign, [n, 1].
        largest, smallest = blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True)
        scales = torch.where(smallest.neg() > largest, smallest, largest)
        scales.masked_fill_(scales.isinf(), math.nan)
        codes = _encode(blocks, scales, self.bits, is_positive=self.is_positive)
        self.records[:, :-_SCALE_BYTES].copy_(codes)
        self.records[:, -_SCALE_BYTES:].copy_(scales.view(torch.uint8))

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for tensors whose memory has the same format."""
        return self.bits, self.is_positive, self.records.shape, self.stride()

    def cut(self, start: int, stop: int) -> "LowBitTensor":
        """Return some of the numbers, flat, over the same memory; they begin with a block, and end with one or all."""
        size = (self.records.shape[1] - _SCALE_BYTES) * 8 // self.bits
        return self.each(lambda records: records[start // size : -(-stop // size)], torch.Size([stop - start]), (1,))

    def each(
        self, change: Callable[[Tensor], Tensor], shape: torch.Size | None = None, stride: Sequence[int] | None = None
    ) -> "LowBitTensor":
        """Return another one of the same kind, over ``change`` of its memory; of this shape, if none is given."""
        shape, stride = (self.shape, self.stride()) if shape is None else (shape, stride)
        return LowBitTensor(change(self.records), shape, stride, bits=self.bits, is_positive=self.is_positive)

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"LowBitTensor({self.decode()!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as a plain tensor on the host; a device may have no memory for one."""
        return self.each(Tensor.cpu).decode().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["records"], (self.bits, self.is_positive)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "LowBitTensor":
        bits, is_positive = context
        return cls(inner["records"], size, stride, bits=bits, is_positive=is_positive)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        ours = args[0] if args and isinstance(args[0], cls) else None
        if ours is not None and kwargs.get("memory_format") in (None, torch.preserve_format):
            if func in _KEEPING or func is torch.ops.aten.clone.default:
                return ours.each(lambda inner: inner if func in _KEEPING else inner.clone())
            if func is TO_COPY and kwargs.get("dtype") in (None, torch.float32):
                device = kwargs.get("device") or ours.device
                return ours.each(lambda inner: inner.to(device, copy=True))
            if func is torch.ops.aten.view.default:
                like = torch.empty_strided(ours.shape, ours.stride(), device="meta").view(args[1])
                return ours.each(lambda inner: inner, like.shape, like.stride())
            if func is torch.ops.aten.copy_.default:
                ours.take_over(args[1])
                return ours
        wide_args, wide_kwargs = tree_map_only(LowBitTensor, decoded, (args, dict(kwargs)))
        result = func(*wide_args, **wide_kwargs)
        if ours is not None and schema_of(func).is_mutable and result is wide_args[0]:
            ours.take_over(result)
            return ours
        return result


def _encode(blocks: Tensor, scales: Tensor, bits: Bits, *, is_positive: bool) -> Tensor:
    """Return a block in each row, uint8."""
    # Of a block of zeros as they are; of one without a number, whose scale tells that, it does not matter.
    ratios = blocks / torch.where(scales.abs() > 0, scales, 1.0)
    if is_positive:
        codes = _root(ratios).mul_(2**bits).round_().sub_(1)
    else:
        half = 2 ** (bits - 1)
        codes = torch.copysign(_root(ratios.abs()), ratios).mul_(half).round_().add_(half - 1)
    codes = codes.clamp_(0, 2**bits - 1).to(torch.uint8)
    if bits == 8:
        return codes
    pairs = codes.view(torch.int16)
    return pairs.bitwise_or_(pairs.bitwise_right_shift(4)).to(torch.uint8)  # which keeps the lower byte


def _root(ratios: Tensor) -> Tensor:
    """Return square roots, rounded right: on a CPU ``torch.sqrt`` is that of MKL, which is off by a bit in a fifth."""
    return ratios.sqrt_() if ratios.device.type != "cpu" else ratios.double().sqrt_().float()


def decoded(value: Any) -> Any:
    """Return the values of a tensor in low bits; anything else as it is."""
    return value.decode() if isinstance(value, LowBitTensor) else value


def record_bytes(count: int, bits: Bits) -> int:
    """Bytes of so many numbers; if there is more than one block, parts add up to the whole."""
    size = _block_size(count, bits)
    return -(-count // size) * (size * bits // 8 + _SCALE_BYTES)


def low_bit_over(
    memory: Tensor, count: int, *, bits: Bits, is_positive: bool, like: Tensor | None = None
) -> LowBitTensor:
    """Return a tensor over ``record_bytes(count)`` bytes, or a part of larger ones: flat, or like ``like``."""
    row = BLOCK_SIZE * bits // 8 + _SCALE_BYTES
    if memory.numel() % row:
        row = _block_size(count, bits) * bits // 8 + _SCALE_BYTES
    shape, stride = ((count,), (1,)) if like is None else (like.shape, dense_stride(like))
    return LowBitTensor(memory.view(-1, row), shape, stride, bits=bits, is_positive=is_positive)


def empty_low_bit(like: Tensor, *, bits: Bits, is_positive: bool) -> LowBitTensor:
    """Return one without values, of the shape, order and device of a tensor."""
    count = like.numel()
    memory = torch.empty(record_bytes(count, bits), dtype=torch.uint8, device=like.device)
    return low_bit_over(memory, count, bits=bits, is_positive=is_positive, like=like)


def _block_size(count: int, bits: Bits) -> int:
    """Return the size of blocks of a tensor: a smaller one has a single block, which ends with a byte."""
    per_byte = 8 // bits
    return min(BLOCK_SIZE, max(1, -(-count // per_byte)) * per_byte)


class CodeMap:
    """The numbers that codes stand for, in a block whose scale is 1: 256 or 16, ascending, on the host, the last is 1.

    Two codes of 4 bits are in a byte, the first in its upper half. ``block_size`` numbers have one scale.
    """

    def __init__(self, values: Tensor, block_size: int) -> None:
        self.values, self.block_size = values, block_size

    @property
    def is_packed(self) -> bool:
        """Whether two codes are in a byte."""
        return len(self.values) == 16

    @lru_cache  # noqa: B019
    def on(self, device: torch.device) -> Tensor:
        """Return the values on a device, which stay: there are a few maps for the life of the process."""
        return self.values.to(device)


class MappedTensor(LowBitTensor):
    """Codes: numbers of a map of 256 or 16, times the float32 scale of their block; always contiguous.

    torchao and bitsandbytes keep moments so (arXiv 2110.02861, 2309.01507); their kernels write to this memory.
    """

    scales: Tensor
    code_map: CodeMap

    def __new__(cls, records: Tensor, scales: Tensor, shape: Sequence[int], code_map: CodeMap) -> "MappedTensor":
        """Make a tensor that has no memory but ``records`` and ``scales``, both flat."""
        made: MappedTensor = make_wrapper(cls, shape, dtype=torch.float32, device=records.device)
        made.records, made.scales, made.code_map = records, scales, code_map
        made.bits, made.is_positive = 4 if code_map.is_packed else 8, bool(code_map.values[0] >= 0)
        return made

    @override
    def decode(self, wide: Tensor | None = None) -> Tensor:
        codes = self.records
        if self.code_map.is_packed:
            codes = torch.stack([codes >> 4, codes & 15], dim=-1)
        numbers = self.code_map.on(self.device)[codes.flatten().int()]
        numbers *= self.scales.repeat_interleave(self.code_map.block_size)[: numbers.numel()]
        return (numbers if wide is None else wide.copy_(numbers)).view(self.shape)

    @override
    def take_over(self, numbers: Tensor) -> None:
        """Set the values from a float32 tensor; what :meth:`decode` returned to the same codes."""
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
        return self.code_map, self.shape

    @override
    def each(
        self, change: Callable[[Tensor], Tensor], shape: torch.Size | None = None, stride: Any = None
    ) -> LowBitTensor:
        shape = self.shape if shape is None else shape
        return MappedTensor(change(self.records), change(self.scales), shape, self.code_map)

    @override
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["records", "scales"], self.code_map

    @classmethod
    @override
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> "MappedTensor":
        return cls(inner["records"], inner["scales"], size, context)


def empty_mapped(like: Tensor, code_map: CodeMap) -> MappedTensor:
    """Return one of zeros, of the shape and device of a contiguous tensor."""
    count = like.numel()
    records = torch.zeros(count // 2 if code_map.is_packed else count, dtype=torch.uint8, device=like.device)
    scales = torch.zeros(-(-count // code_map.block_size), device=like.device)
    return MappedTensor(records, scales, like.shape, code_map)
