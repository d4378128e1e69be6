"""Float32 tensors in 8 bit: their bytes, their error, and that what was read is written to the same bits."""

import copy
import io
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_vram.core.tensors.eight_bit import EightBitTensor, eight_bit_over, empty_eight_bit, record_bytes

TINIEST = 2.0**-9 / 224  # of the largest magnitude in a block, at most: what does not become zero


def numbers(*shape: int, exponent: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    spread = 10 ** (4 * torch.rand(shape, generator=generator) - 4)
    return torch.randn(shape, generator=generator) * spread * 2.0**exponent


def kept(values: Tensor, *, is_positive: bool = False) -> EightBitTensor:
    made = empty_eight_bit(values.shape, is_positive=is_positive)
    made.copy_(values)
    return made


@settings(max_examples=100, deadline=None, database=None, derandomize=True)
@given(size=st.integers(0, 700), exponent=st.integers(-100, 110))
def test_the_error_is_a_sixteenth_and_what_was_read_is_written_to_the_same_bits(size: int, exponent: int) -> None:
    values = numbers(size, exponent=exponent)
    made = kept(values)
    read = made.decode()
    bound = values.abs() / 16
    for block in range(0, size, 128):
        smallest = values[block : block + 128].abs().max() * TINIEST
        bound[block : block + 128].clamp_(min=float(smallest))
    assert bool(((read - values).abs() <= bound).all())
    assert torch.equal(kept(read).decode(), read)


@pytest.mark.parametrize(("count", "num_bytes"), [(0, 0), (1, 2), (127, 128), (128, 129), (129, 258), (1280, 1290)])
def test_bytes(count: int, num_bytes: int) -> None:
    assert record_bytes(count) == num_bytes == empty_eight_bit((count,), is_positive=False).nbytes


def test_what_is_divided_by_does_not_become_zero() -> None:
    values = torch.tensor([1.0, 1e-12, 0.0, 1e-30])
    assert kept(values, is_positive=True).decode().gt(0).tolist() == [True, True, False, True]
    assert kept(values).decode().gt(0).tolist() == [True, False, False, False]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_block_with_no_number_has_none(odd: float) -> None:
    values = torch.ones(384)
    values[130] = odd
    read = kept(values, is_positive=True).decode()
    assert read[128:256].isnan().all()
    assert torch.equal(read[:128], values[:128])
    assert torch.equal(read[256:], values[256:])


def test_parts_are_over_the_same_memory() -> None:
    values = numbers(3, 1000)
    whole, parts = kept(values), empty_eight_bit(values.shape, is_positive=False)
    for start, stop in ((0, 1024), (1024, 2944), (2944, 3000)):
        parts.cut(start, stop).copy_(values.view(-1)[start:stop])
    assert torch.equal(parts.records, whole.records)
    part = eight_bit_over(whole.records.view(-1)[: 129 * 2], 256, is_positive=False)
    assert torch.equal(part.decode(), whole.decode().view(-1)[:256])
    tail = eight_bit_over(whole.records.view(-1)[-129:], 56, is_positive=False)
    assert torch.equal(tail.decode(), whole.decode().view(-1)[-56:])


def test_operators_work_on_the_values() -> None:
    made = kept(numbers(6, 50))
    read = made.decode()
    assert torch.equal(made + 1, read + 1)
    assert torch.equal(torch.maximum(read * 0, made), read.clamp(min=0))
    assert made.view(-1).shape == (300,)
    assert torch.equal(made.view(3, -1).decode(), read.view(3, -1))
    twin = made.clone()
    assert made.mul_(2) is made
    assert torch.equal(made.decode(), 2 * read)
    assert isinstance(twin, EightBitTensor)
    assert torch.equal(twin.decode(), read)
    assert not made.zero_().any()
    assert torch.equal(made.copy_(twin).decode(), read)
    assert isinstance(made.to("cpu", copy=True), EightBitTensor)
    assert isinstance(copy.deepcopy(made), EightBitTensor)
    assert made.double().dtype == torch.float64
    assert repr(made).startswith("EightBitTensor(tensor(")


def test_it_is_saved_as_a_plain_tensor() -> None:
    made, file = kept(numbers(2, 200)), io.BytesIO()
    torch.save({"exp_avg": made}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["exp_avg"]
    assert type(loaded) is Tensor
    assert torch.equal(loaded, made.decode())
