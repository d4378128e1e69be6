"""Codecs with an error: it stays within the bound that is stated, and what was read is written to the same bits."""

import copy
import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_vram.core.tensors.codecs import (
    LOSSY_FORMATS,
    LowBitTensor,
    decode,
    empty_low_bit,
    encode,
    encoded_itemsize,
    low_bit_over,
    record_bytes,
)

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
ROUNDING = {torch.float64: 0.0, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
TINY = {torch.float64: 0.0, torch.float32: 1e-36, torch.float16: 2.0**-24, torch.bfloat16: 1e-36}


def bounds(numbers: torch.Tensor, to: str, block_size: int) -> torch.Tensor:
    """The largest errors the documentation allows, before rounding to the dtype."""
    exact = numbers.double()
    if to == "bf16":
        return exact.abs() / 256
    padded = torch.cat([exact, exact.new_zeros(-exact.numel() % block_size)]).view(-1, block_size)
    largest = padded.abs().amax(1, keepdim=True).expand_as(padded).reshape(-1)[: exact.numel()]
    return largest / 254 if to == "int8" else torch.maximum(exact.abs() / 16, largest / 458752)


@settings(max_examples=150, deadline=None, database=None, derandomize=True)
@given(
    to=st.sampled_from(LOSSY_FORMATS),
    dtype=st.sampled_from(DTYPES),
    size=st.integers(1, 300),
    block_size=st.sampled_from([1, 7, 32, 128]),
    exponent=st.integers(-30, 30),
    spread=st.integers(0, 12),
    seed=st.integers(0, 1000),
)
def test_the_error_stays_within_its_bound(to, dtype, size, block_size, exponent, spread, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    scales = 2.0 ** (
        torch.randint(-spread, 1, (size,), generator=generator) + min(exponent, 14 if "16" in str(dtype) else 30)
    )
    numbers = (torch.randn(size, generator=generator, dtype=torch.float64) * scales).to(dtype)
    numbers = numbers.nan_to_num(0, 1, -1)
    stored = decode(encode(numbers, to, block_size), to, dtype, size)
    assert stored.dtype is dtype
    error = (stored.double() - numbers.double()).abs()
    allowed = bounds(numbers, to, block_size)
    allowed = allowed * (1 + 1e-5) + (numbers.double().abs() + allowed) * ROUNDING[dtype] + TINY[dtype]
    assert (error <= allowed).all(), (error / allowed).max()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_infinities_stay_in_bf16_and_make_their_block_nan_in_the_others(dtype: torch.dtype, value: float) -> None:
    numbers = torch.ones(300, dtype=dtype)
    numbers[130] = value
    stored = decode(encode(numbers, "bf16"), "bf16", dtype, 300)
    assert torch.equal(stored.nan_to_num(7.0), numbers.nan_to_num(7.0))
    for to in ("fp8", "int8"):
        stored = decode(encode(numbers, to, 128), to, dtype, 300)
        assert stored[128:256].isnan().all()
        assert (stored[:128] - 1).abs().max() < 0.01
        assert (stored[256:] - 1).abs().max() < 0.01


def test_bytes_are_one_or_two_each_and_four_per_block() -> None:
    numbers = torch.randn(1000)
    assert sum(piece.nbytes for piece in encode(numbers, "bf16")) == 2000
    for to in ("fp8", "int8"):  # 8 blocks of 128
        assert [piece.nbytes for piece in encode(numbers, to)] == [1024, 32]
        assert encoded_itemsize(to) == 1
    assert encoded_itemsize("bf16") == 2
    assert [piece.nbytes for piece in encode(torch.ones(10), "int8", 2**40)] == [10, 4]  # no more than there is
    assert [piece.nbytes for piece in encode(torch.ones(0), "int8")] == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("to", ["fp8", "int8"])
def test_no_finite_number_becomes_infinite(to: str, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    numbers = torch.tensor([largest * (1 - share) for share in (0.0, 1e-7, 1e-3, 0.1)], dtype=dtype)
    for block_size in (1, 4):
        stored = decode(encode(numbers, to, block_size), to, dtype, 4)
        assert stored.isfinite().all()
        assert torch.allclose(stored.double(), numbers.double(), rtol=0.07)


def numbers(*shape: int, exponent: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    spread = 10 ** (4 * torch.rand(shape, generator=generator) - 4)
    return torch.randn(shape, generator=generator) * spread * 2.0**exponent


def kept(values: Tensor, *, bits: int = 8, is_positive: bool = False) -> LowBitTensor:
    made = empty_low_bit(values, bits=bits, is_positive=is_positive)
    made.copy_(values)
    return made


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(st.integers(0, 700), st.integers(-100, 110), st.sampled_from([8, 4]), st.booleans())
def test_roots_are_near_and_what_was_read_is_written_to_the_same_bits(size, exponent, bits, is_positive):
    values = numbers(size, exponent=exponent)
    values = values.abs() if is_positive else values
    made = kept(values, bits=bits, is_positive=is_positive)
    read = made.decode()
    distance = 0.5**bits if is_positive else 2 * 0.5**bits
    for block in range(0, size, 128):
        wide, narrow = (one[block : block + 128].double() for one in (values, read))
        place = int(wide.abs().argmax())
        assert wide[place] == narrow[place]  # the largest is exact, and the unit of the others
        wide, narrow = wide / wide[place], narrow / narrow[place]
        roots, kept_roots = (one.abs().sqrt() * one.sign() for one in (wide, narrow))
        lowest = distance if is_positive else distance - 1
        assert ((roots.clamp(min=lowest) - kept_roots).abs() <= 0.5001 * distance).all()
    assert torch.equal(kept(read, bits=bits, is_positive=is_positive).records, made.records)
    if is_positive:
        assert read.gt(0).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("count", "rows", "size"), [(0, 0, 0), (127, 1, 127), (129, 2, 128)])
def test_bytes(count: int, rows: int, size: int, bits: int) -> None:
    num_bytes = rows * (math.ceil(size * bits / 8) + 4)
    made = empty_low_bit(torch.empty(count), bits=bits, is_positive=False)
    assert record_bytes(count, bits) == num_bytes == made.nbytes
    values = numbers(count)
    assert kept(values, bits=bits).decode().shape == values.shape


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("is_positive", [False, True])
def test_blocks_of_zeros_stay_so(bits: int, is_positive: bool) -> None:
    values = torch.zeros(300)
    values[260] = 2.0
    read = kept(values, bits=bits, is_positive=is_positive).decode()
    assert not read[:256].any()
    assert read[260] == 2.0
    assert (read[270] > 0) == is_positive
    assert read[270] <= 2.0 * 0.5 ** (2 * bits)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("odd", [math.nan, math.inf])
def test_a_block_with_no_number_has_none(odd: float, bits: int) -> None:
    values = torch.ones(384)
    values[130] = odd
    read = kept(values, bits=bits, is_positive=True).decode()
    assert read[128:256].isnan().all()
    assert torch.equal(read[:128], values[:128])
    assert torch.equal(read[256:], values[256:])


@pytest.mark.parametrize(("bits", "row"), [(8, 132), (4, 68)])
def test_parts_are_over_the_same_memory(bits: int, row: int) -> None:
    values = numbers(3, 1000)
    whole, parts = kept(values, bits=bits), empty_low_bit(values, bits=bits, is_positive=False)
    for start, stop in ((0, 1024), (1024, 2944), (2944, 3000)):
        parts.cut(start, stop).copy_(values.view(-1)[start:stop])
    assert torch.equal(parts.records, whole.records)
    part = low_bit_over(whole.records.view(-1)[: row * 2], 256, bits=bits, is_positive=False)
    assert torch.equal(part.decode(), whole.decode().view(-1)[:256])
    tail = low_bit_over(whole.records.view(-1)[-row:], 56, bits=bits, is_positive=False)
    assert torch.equal(tail.decode(), whole.decode().view(-1)[-56:])


@pytest.mark.parametrize("bits", [8, 4])
def test_operators_work_on_the_values(bits: int) -> None:
    made = kept(numbers(6, 50), bits=bits)
    read = made.decode()
    assert torch.equal(made + 1, read + 1)
    assert torch.equal(torch.maximum(read * 0, made), read.clamp(min=0))
    assert made.view(-1).shape == (300,)
    assert torch.equal(made.view(3, -1).decode(), read.view(3, -1))
    twin = made.clone()
    assert made.mul_(2) is made
    assert torch.equal(made.decode(), 2 * read)
    assert isinstance(twin, LowBitTensor)
    assert torch.equal(twin.decode(), read)
    assert not made.zero_().any()
    assert torch.equal(made.copy_(twin).decode(), read)
    moved = made.to("meta")
    assert isinstance(moved, LowBitTensor)
    assert moved.records.device.type == "meta"
    assert isinstance(made.to("cpu", copy=True), LowBitTensor)
    assert isinstance(copy.deepcopy(made), LowBitTensor)
    assert made.double().dtype == torch.float64
    assert repr(made).startswith("LowBitTensor(tensor(")


def test_it_is_saved_as_a_plain_tensor() -> None:
    made, file = kept(numbers(2, 200)), io.BytesIO()
    torch.save({"exp_avg": made}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["exp_avg"]
    assert type(loaded) is Tensor
    assert torch.equal(loaded, made.decode())
