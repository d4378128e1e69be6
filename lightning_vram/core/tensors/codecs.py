"""Store numbers in fewer bits: masks, lossy codecs, fp32 cut to 16 bits, and low-bit tensors."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_vram.core.tensors.native_codecs import native_codecs
from lightning_vram.core.tensors.properties import dense_stride, flat_as_stored, stored_like
from lightning_vram.private_names.dispatcher import TO_COPY, FakeTensor, schema_of, without_dispatch
from lightning_vram.private_names.torch import make_wrapper, tree_map_only


def pack_bits(mask: Tensor) -> Tensor:
    """Return the elements of ``mask`` that are not zero as bits: ``uint8`` of shape ``[ceil(mask.numel() / 8)]``."""
    flags = (mask if mask.dtype is torch.bool else mask != 0).reshape(-1)
    missing = -flags.numel() % 8
    if missing:
        flags = torch.cat([flags, flags.new_zeros(missing)])
    # Chosen, not multiplied: a bool seen through a view may be any byte but zero.
    return torch.where(flags.view(-1, 8), _weights(mask.device), 0).sum(1, dtype=torch.uint8)


def unpack_bits(bits: Tensor, like: Tensor) -> Tensor:
    """Write the mask back into ``like``, whose shape, strides and dtype are those of the original, and return it."""
    flags = bits.unsqueeze(1).bitwise_and(_weights(bits.device)).ne_(0).view(-1)[: like.numel()]
    return like.copy_(flags.view(like.shape))


def _weights(device: torch.device) -> Tensor:
    return torch.bitwise_left_shift(1, torch.arange(8, dtype=torch.uint8, device=device))  # made there: no copy to it


LossyFormat = Literal["bf16", "fp8", "int8"]
LOSSY_FORMATS: tuple[LossyFormat, ...] = ("bf16", "fp8", "int8")
_LARGEST = {"fp8": 448.0, "int8": 127.0}


def encoded_itemsize(to: LossyFormat) -> int:
    """Return the bytes that one number takes, scales not counted."""
    return 2 if to == "bf16" else 1


def encode(numbers: Tensor, to: LossyFormat, block_size: int = 128) -> list[Tensor]:
    """Store flat, contiguous ``numbers`` in fewer bits; return the pieces for :func:`decode`: numbers, and scales.

    The error of a number ``x``, in a block of ``block_size`` neighbours with the largest magnitude ``m``:

    * ``"bf16"``: at most ``|x| / 256``, or 4.6e-41 for the smallest ones. Numbers above 3.39e38 become infinite.
    * ``"fp8"`` (e4m3): at most ``|x| / 16``, or ``m / 458752`` for the smallest ones.
    * ``"int8"``: at most half a step, ``m / 254``.

    With the last two, a block with ``m`` below 1.2e-38 times 448 or 127 becomes zeros, and one that holds an infinity
    or NaN becomes NaN as a whole: a check would block the host, and it must not come back as a number.
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
        return torch.linalg.vector_norm(blocks, math.inf, 1, keepdim=True, dtype=dtype)  # type: ignore[no-any-return]
    # On the CPU the norm takes a hundred times as long.
    return torch.maximum(blocks.amax(1, keepdim=True), blocks.amin(1, keepdim=True).neg_()).abs_().to(dtype)


_HALF = 0x8000
_STRIDE = 40503  # the golden ratio of 2^16: multiples of it are spread over all of its numbers
_INVERSE = pow(_STRIDE, -1, 2**16)
_PERIOD = 2**16  # of draws
_UPPER = -0x10000  # the mask of the sixteen bits that bf16 has in common with fp32


def split_(numbers: Tensor, lower: Tensor) -> None:
    """Round fp32 ``numbers`` to the nearest bf16, half away from zero, and save the lower half in ``lower`` (int16).

    Halves to even, as a conversion rounds, would give 65537 numbers to an even one: more than the lower half tells.
    """
    bits = _regular_bits(numbers)
    lower.copy_(bits)  # a narrowing copy keeps the lower half
    bits.add_(_HALF).bitwise_and_(_UPPER)


def join_(numbers: Tensor, lower: Tensor) -> None:
    """Undo :func:`split_` in ``numbers``, bit-exactly but for NaNs, which come back in their usual pattern.

    Numbers that were written since move by half a unit in the last place of bf16 at most, NaNs not at all, and zeros
    stay zeros: so what was split from numbers below 2^-134 is lost.
    """
    own = numbers.bfloat16().view(torch.int16).bitwise_and_(0x7FFF).ne_(0).mul_(lower)  # of nonzero ones
    bits = numbers.view(torch.int32).add_(own)
    bits.sub_(own.mul_(numbers.isnan()))  # beyond infinity


def compensate_(numbers: Tensor, compensation: Tensor) -> Tensor:
    """Return fp32 ``numbers``, which are overwritten, as bf16; ``compensation`` (bf16) gets the rest.

    The sum of two such numbers comes out unchanged, except for the sign of a zero.
    """
    nearest = numbers.bfloat16()
    compensation.copy_(numbers.sub_(nearest).nan_to_num_(0.0, 0.0, 0.0))  # infinity less infinity
    # The compensation may have been rounded up to exactly half a unit, and then the sum has another nearest number.
    numbers.copy_(compensation).add_(nearest)
    nearest.copy_(numbers)
    compensation.copy_(numbers.sub_(nearest).nan_to_num_(0.0, 0.0, 0.0))
    return nearest


def add_compensation_(numbers: Tensor, compensation: Tensor) -> None:
    """Undo :func:`compensate_` in ``numbers``, but for numbers written since: their compensation is too large."""
    sums = compensation.float().add_(numbers)
    is_own = sums.bfloat16().view(torch.int16) == numbers.bfloat16().view(torch.int16)
    torch.where(is_own, sums, numbers, out=numbers)


def rounded_by_place(numbers: Tensor, first: int, seed: int, kept: Tensor | None = None) -> Tensor:
    """Round to bf16, to each neighbour with the probability of its closeness; ``numbers`` (flat fp32) are overwritten.

    Draws depend on a 16-bit ``seed`` and on each place, counted from ``first``, and on nothing else.
    """
    kept = torch.empty_like(numbers, dtype=torch.bfloat16) if kept is None else kept
    # Draws are place * stride + seed, in 16 bit: a row that comes again after 65536, and begins elsewhere by the seed.
    start = (first + seed * _INVERSE) & 0xFFFF
    native = native_codecs(numbers, kept)
    if native is not None:
        native.round_by_place(numbers, draw_of(first, seed), kept)
        return kept
    bits, draws = _regular_bits(numbers), _draws_from(start, numbers)
    whole = bits.numel() // _PERIOD * _PERIOD
    if whole:
        bits[:whole].view(-1, _PERIOD).add_(draws)
    bits[whole:].add_(draws[: bits.numel() - whole])
    bits.bitwise_and_(_UPPER)
    return kept.copy_(numbers)  # which changes none, and is faster than to take the upper halves


def draw_of(place: int, seed: int) -> int:
    """Return the draw of 16 bits of :func:`rounded_by_place` for a place."""
    return (place * _STRIDE + seed) & 0xFFFF


def seed_of(step: int, number: int, salt: int) -> int:
    """Return a seed of 16 bits for :func:`rounded_by_place`: the hash "lowbias32" of C. Wellons, of three numbers."""
    bits = (step * 0x9E3779B1 + number * 0x85EBCA77 + salt * 0xC2B2AE3D) & 0xFFFFFFFF
    bits = ((bits ^ bits >> 16) * 0x7FEB352D) & 0xFFFFFFFF
    bits = ((bits ^ bits >> 15) * 0x846CA68B) & 0xFFFFFFFF
    return (bits ^ bits >> 16) & 0xFFFF


def _draws_from(start: int, like: Tensor) -> Tensor:
    """Return the draws of a period of places, or fewer if there are fewer, int32."""
    if like.device.type == "cpu" and not isinstance(like, FakeTensor):
        return _draws_on_host()[start : start + _PERIOD]
    return _make_draws(start, start + min(_PERIOD, like.numel()), like.device)


@cache
def _draws_on_host() -> Tensor:
    with without_dispatch():  # they stay, and belong to no run
        return _make_draws(0, 2 * _PERIOD, torch.device("cpu"))


def _make_draws(start: int, stop: int, device: torch.device) -> Tensor:
    return torch.arange(start, stop, dtype=torch.int32, device=device).mul_(_STRIDE).bitwise_and_(0xFFFF)


def _regular_bits(numbers: Tensor) -> Tensor:
    """Return the patterns, NaNs in the usual one: CUDA's would overflow to zero, others end as infinity."""
    return numbers.nan_to_num_(math.nan, math.inf, -math.inf).view(torch.int32)


Bits = Literal[8, 4]
BLOCK_SIZE = 128
_SCALE_BYTES = 4
_KEEPING = {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


class LowBitTensor(Tensor):
    """A float32 tensor of 8 or 4 bits per number, and 32 for each block of 128 neighbours: its largest number.

    A number is a square: the largest one of its block times (n / 128)^2 with the sign of n, -127 <= n <= 128, or in 4
    bits (n / 8)^2, -7 <= n <= 8; if it ``is_positive`` (a divisor) times (n / 256)^2, 1 <= n <= 256, or (n / 16)^2, and
    never zero. So roots, by which Adam divides, are at even distances. What was read is written again to the same bits.
    Blocks of 128 and no zero for divisors are from Li, Chen and Zhu, "Memory Efficient Optimizers with 4-bit States"
    (2023); roots from "FlashOptim" (arXiv 2602.23349).

    Readers see a float32 tensor: each operator works on a copy of its values, and writes round to the nearest.

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
        return sum(getattr(self, name).nbytes for name in self.__tensor_flatten__()[0])

    def decode(self) -> Tensor:
        """Return the values, in new memory."""
        out = self.records.new_empty(self.numel(), dtype=torch.float32)
        native = native_codecs(out, self.records)
        if native is None:
            out.copy_(decode_rows(self.records, self.bits, is_positive=self.is_positive).view(-1)[: self.numel()])
        else:
            native.decode_low_bit(self.records, out, self.bits, is_positive=self.is_positive)
        return out.as_strided(self.shape, self.stride())

    def take_over(self, numbers: Tensor) -> None:
        """Set the values from a float32 tensor of this shape."""
        if isinstance(numbers, LowBitTensor) and numbers.kind == self.kind:
            self.records.copy_(numbers.records)
            return
        size = self.block_size
        flat = flat_as_stored(stored_like(decoded(numbers).detach().to(self.device, torch.float32), self))
        native = native_codecs(flat, self.records)
        if native is not None:
            native.encode_low_bit(flat, self.records, self.bits, is_positive=self.is_positive)
            return
        missing = self.records.shape[0] * size - flat.numel()
        blocks = (torch.nn.functional.pad(flat, (0, missing)) if missing else flat).view(-1, size)
        if blocks.numel():
            encode_rows(blocks, self.records, self.bits, is_positive=self.is_positive)

    @property
    def block_size(self) -> int:
        """Numbers in a block: 128, or fewer in a tensor of fewer."""
        return (self.records.shape[1] - _SCALE_BYTES) * 8 // self.bits

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for tensors whose memory has the same format."""
        return self.bits, self.is_positive, self.records.shape, self.stride()

    def cut(self, start: int, stop: int) -> "LowBitTensor":
        """Return some of the numbers, flat, over the same memory; they begin with a block, and end with one or all."""
        size = self.block_size
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
        args, kwargs = tree_map_only(LowBitTensor, decoded, (args, dict(kwargs)))
        result = func(*args, **kwargs)
        if ours is not None and schema_of(func).is_mutable and result is args[0]:
            ours.take_over(result)
            return ours
        return result


def decode_rows(records: Tensor, bits: int, *, is_positive: bool) -> Tensor:
    """Return the float32 values of :class:`LowBitTensor`, a block in each row, from its records."""
    # Compiled, too: views of the same item size only, as another one would be a kernel by itself.
    low, second, third, high = (records[:, place, None].int() for place in range(-_SCALE_BYTES, 0))
    scales = (low | second << 8 | third << 16 | high << 24).view(torch.float32)
    codes = records[:, :-_SCALE_BYTES]
    if bits == 4:  # two neighbours in a byte, the first one in its lower half
        shifts = torch.arange(0, 8, 4, dtype=torch.uint8, device=records.device)
        codes = (codes.unsqueeze(2) >> shifts & 0xF).flatten(1)
    offset, unit = (-1, 0.5**bits) if is_positive else (2 ** (bits - 1) - 1, 2 * 0.5**bits)
    roots = (codes.float() - offset) * unit
    return roots * roots.abs() * scales


def encode_rows(numbers: Tensor, records: Tensor, bits: int, *, is_positive: bool) -> None:
    """Write float32 numbers, a block in each row, to records."""
    # The largest magnitude in each row, with its sign, [n, 1].
    largest, smallest = numbers.amax(1, keepdim=True), numbers.amin(1, keepdim=True)
    scales = torch.where(-smallest > largest, smallest, largest)
    scales = torch.where(scales.abs() == math.inf, math.nan, scales)
    # Of a block of zeros as they are; of one without a number, whose scale tells that, it does not matter.
    ratios = numbers / torch.where(scales.abs() > 0, scales, 1.0)
    offset, units = (-1, 2**bits) if is_positive else (2 ** (bits - 1) - 1, 2 ** (bits - 1))
    codes = torch.round(torch.copysign(_root(ratios.abs()), ratios) * units) + offset
    codes = codes.clamp(0, 2**bits - 1).to(torch.uint8)
    if bits == 4:
        pairs = codes.view(codes.shape[0], -1, 2)
        codes = pairs[..., 0] | pairs[..., 1] << 4
    records[:, :-_SCALE_BYTES].copy_(codes)
    for place in range(_SCALE_BYTES):
        records[:, place - _SCALE_BYTES].copy_((scales.view(torch.int32) >> 8 * place & 0xFF).squeeze(1))


def _root(ratios: Tensor) -> Tensor:
    """Return square roots, rounded right: on a CPU ``torch.sqrt`` is that of MKL, which is off by a bit in a fifth."""
    return ratios.sqrt() if ratios.device.type != "cpu" else ratios.double().sqrt().float()


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
