"""The error of each codec stays within the bound its documentation states, and infinities are never lost."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_vram.core.tensors.codecs import LOSSY_FORMATS, decode, encode, encoded_itemsize

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
