"""Codecs in C: the bits that operators give, and operators where there is no compiler."""

import logging
import math

import pytest
import torch
from support.compiled_codecs import coded_in_c, needs_compiler
from torch import Tensor, nn

from lightning_vram.core.tensors import native_codecs
from lightning_vram.core.tensors.codecs import LowBitTensor, empty_low_bit, rounded_by_place


def patterns(count: int, seed: int = 0) -> Tensor:
    """Floats of every kind: all exponents, zeros, subnormal numbers, infinities, NaNs."""
    generator = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=generator).int()
    odd = torch.tensor([0, -(2**31), 1, 0x7F800000, -0x800000, 0x7FFFFFFF, -1, 0x7F800001, 0x7F7FFFFF, 0x007FFFFF])
    bits[: odd.numel()] = odd[:count].int()
    return bits.view(torch.float32)


def same(one: Tensor, other: Tensor) -> bool:
    """Whether all bits are the same but for those of NaNs."""
    is_nan = one.isnan()
    return torch.equal(is_nan, other.isnan()) and torch.equal(
        one.masked_fill(is_nan, 0).float().view(torch.int32), other.masked_fill(is_nan, 0).float().view(torch.int32)
    )


@needs_compiler
@pytest.mark.parametrize("count", [7, 10_001])
@pytest.mark.parametrize(("first", "seed"), [(0, 0), (2**40 + 3, 65_535)])
def test_rounding_by_place_has_the_bits_of_operators(count, first, seed):
    numbers = patterns(count)
    expected = rounded_by_place(numbers.clone(), first, seed)
    with coded_in_c():
        assert same(rounded_by_place(numbers.clone(), first, seed), expected)
        kept = torch.empty(count, dtype=torch.bfloat16)
        assert rounded_by_place(numbers.clone(), first, seed, kept) is kept
    assert same(kept, expected)


def blocks(exponent: int, count: int, bits: int) -> Tensor:
    """Numbers over all of the range of a block, halves between two codes among them."""
    generator = torch.Generator().manual_seed(exponent + bits)
    halves = (torch.randint(-(2**bits), 2**bits + 1, (count,), generator=generator) / 2 ** (bits + 1)).square()
    is_half = torch.rand(count, generator=generator) < 0.5
    some = torch.randn(count, generator=generator) * torch.randint(-22, 1, (count,), generator=generator).exp2()
    return torch.where(is_half, halves.copysign(some), some) * 2.0**exponent


@needs_compiler
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("is_positive", [False, True])
@pytest.mark.parametrize("count", [99, 129, 10_000])
def test_low_bits_have_the_bits_of_operators(count, is_positive, bits):
    def check(values: Tensor) -> None:
        def make() -> LowBitTensor:
            made = empty_low_bit(values, bits=bits, is_positive=is_positive)
            made.copy_(values)
            return made

        expected = make()
        read = expected.decode()
        with coded_in_c():
            made = make()
            again = made.decode(), expected.decode()
        # But for signs of zeros, which have no order.
        assert all(torch.equal(one.nan_to_num(7.0), read.nan_to_num(7.0)) for one in again)
        scales = torch.tensor(expected.records[:, -4:].tolist(), dtype=torch.uint8).view(torch.float32)  # aligned
        is_number = ~scales.isnan().view(-1)
        assert torch.equal(made.records[is_number, :-4], expected.records[is_number, :-4])

    def signed(values: Tensor) -> Tensor:
        return values.abs() if is_positive else values

    for exponent in (-149, -130, -126, -20, 0, 20, 100):
        check(signed(blocks(exponent, count, bits)))
    check(signed(patterns(count)))
    check(torch.zeros(count))
    odd = torch.ones(count)
    odd[count // 2] = math.inf
    check(odd)


@needs_compiler
def test_a_step_that_has_the_bits_of_torchs_kernel_is_used_and_no_other(monkeypatch):
    assert native_codecs.compile_codecs().has_step == torch.backends.cpu.get_cpu_capability().startswith("AVX")
    monkeypatch.setattr(native_codecs.AdamWStep, "numbers", lambda self: (1.0, 0.1, 0.9, 0.1, 1.0, 0.0, -0.1))
    assert not native_codecs.compile_codecs().has_step


def test_devices_views_and_few_numbers_are_left_to_operators(monkeypatch):
    made = object()
    monkeypatch.setattr(native_codecs, "_ask", lambda count: made)
    many = torch.ones(native_codecs.LEAST)
    assert native_codecs.native_codecs(many, many) is made
    for numbers, other in ((many[1:], many), (many, many[::2]), (many.to("meta"), many), (many, nn.Parameter(many))):
        assert native_codecs.native_codecs(numbers, other) is None


@pytest.mark.parametrize(
    ("compiler", "ending"),
    [
        ("none", " (no such compiler; set the environment variable CC to another one)."),
        ("false", "."),  # a program that fails
    ],
)
def test_without_a_compiler_one_line_says_so(monkeypatch, caplog, compiler, ending):
    monkeypatch.setenv("CC", compiler)
    with caplog.at_level(logging.WARNING):
        assert native_codecs.compile_codecs() is None
    (message,) = caplog.messages
    start = f"Optimizer steps with low-precision moments on the host are slow: {compiler} cannot compile their codecs"
    assert message.startswith(start)
    assert message.endswith(ending)


@needs_compiler
def test_of_a_million_numbers_none_is_coded_otherwise():
    """``torch.sqrt`` of a CPU would differ in some."""
    for is_positive in (False, True):
        values = torch.rand(2**20, generator=torch.Generator().manual_seed(5))
        plain, native = (empty_low_bit(values, bits=8, is_positive=is_positive) for _ in range(2))
        plain.copy_(values)
        with coded_in_c():
            native.copy_(values)
        assert torch.equal(plain.records, native.records)
