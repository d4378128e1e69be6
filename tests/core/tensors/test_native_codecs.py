"""Codecs in C: the bits that operators give, and operators where there is no compiler."""

import logging
import math
import shutil
from pathlib import Path

import pytest
import torch
from support.compiled_codecs import coded_in_c, compiled, needs_compiler
from torch import Tensor, nn

from lightning_vram.core.tensors import native_codecs
from lightning_vram.core.tensors.bit_patterns import rounded_by_place
from lightning_vram.core.tensors.eight_bit import EightBitTensor, empty_eight_bit


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
@pytest.mark.parametrize("count", [1, 7, 4096, 10_001])
@pytest.mark.parametrize(("first", "seed"), [(0, 0), (70_000, 5), (2**40 + 3, 65_535)])
def test_rounding_by_place_has_the_bits_of_operators(count, first, seed):
    numbers = patterns(count)
    expected = rounded_by_place(numbers.clone(), first, seed)
    with coded_in_c():
        assert same(rounded_by_place(numbers.clone(), first, seed), expected)
        kept = torch.empty(count, dtype=torch.bfloat16)
        assert rounded_by_place(numbers.clone(), first, seed, kept) is kept
    assert same(kept, expected)


def blocks(exponent: int, count: int) -> Tensor:
    """Numbers over all of the range of a block, halves between two codes among them."""
    generator = torch.Generator().manual_seed(exponent)
    spread = 2.0 ** torch.randint(-22, 1, (count,), generator=generator)
    halves = torch.randint(-64, 65, (count,), generator=generator) / 32
    return (
        torch.where(torch.rand(count, generator=generator) < 0.5, halves, torch.randn(count)) * spread * 2.0**exponent
    )


@needs_compiler
@pytest.mark.parametrize("is_positive", [False, True])
@pytest.mark.parametrize("count", [1, 100, 128, 129, 10_000])
def test_8_bit_has_the_bits_of_operators(count, is_positive):
    for exponent in (-149, -130, -126, -118, -20, 0, 20, 127):
        values = blocks(exponent, count)
        values = values.abs() if is_positive else values
        check_8_bit(values, is_positive)
    check_8_bit(patterns(count), is_positive)
    odd = torch.ones(count)
    odd[count // 2] = math.inf
    check_8_bit(odd, is_positive)


def check_8_bit(values: Tensor, is_positive: bool) -> None:
    def make() -> EightBitTensor:
        made = empty_eight_bit(values.shape, is_positive=is_positive)
        made.copy_(values)
        return made

    expected = make()
    read = expected.decode()
    with coded_in_c():
        made = make()
        assert same(made.decode(), read)
        assert same(expected.decode(), read)
    is_number = expected.records[:, -1] != 0
    assert torch.equal(made.records[:, -1], expected.records[:, -1])
    assert torch.equal(made.records[is_number], expected.records[is_number])


@needs_compiler
def test_every_code_is_decoded_as_operators_do():
    made = empty_eight_bit((256,), is_positive=False)
    made.records[:, :-1] = torch.arange(256, dtype=torch.uint8).view(2, 128)
    for exponent in (0, 1, 127, 247):
        made.records[:, -1] = exponent
        expected = made.decode()
        with coded_in_c():
            assert same(made.decode(), expected)


@needs_compiler
def test_the_step_has_the_bits_of_torchs_kernel():
    assert compiled().has_step == torch.backends.cpu.get_cpu_capability().startswith("AVX")


@needs_compiler
def test_a_step_that_rounds_otherwise_is_not_used(monkeypatch):
    monkeypatch.setattr(native_codecs.AdamWStep, "numbers", lambda self: (1.0, 0.1, 0.9, 0.1, 1.0, 0.0, -0.1))
    made = native_codecs.compile_codecs()
    assert made is not None
    assert not made.has_step


@needs_compiler
def test_nothing_is_compiled_before_as_much_is_coded_as_it_takes(monkeypatch):
    monkeypatch.setattr(native_codecs, "PATIENCE", 10_000)
    made = object()
    monkeypatch.setattr(native_codecs, "compile_codecs", lambda: made)
    supply = native_codecs._Supply()
    assert [supply.ask(5_000) for _ in range(3)] == [None, None, made]


def test_devices_views_and_few_numbers_are_left_to_operators(monkeypatch):
    made = object()
    monkeypatch.setattr(native_codecs._supply, "ask", lambda count: made)
    many = torch.ones(native_codecs.LEAST)
    assert native_codecs.native_codecs(many, many) is made
    for numbers, other in ((many[1:], many), (many, many[::2]), (many.to("meta"), many), (many, nn.Parameter(many))):
        assert native_codecs.native_codecs(numbers, other) is None


def test_without_a_compiler_one_line_says_so(monkeypatch, caplog):
    monkeypatch.setenv("CC", "none")
    with caplog.at_level(logging.WARNING):
        assert native_codecs.compile_codecs() is None
    assert caplog.messages == [
        "Steps with narrow moments on the host are slow: none compiles no codecs for them (there is no such compiler; "
        "the environment variable CC names another one)."
    ]


@pytest.mark.skipif(shutil.which("false") is None, reason="there is no such program")
def test_a_compiler_that_fails_is_named(monkeypatch, caplog):
    monkeypatch.setenv("CC", "false")
    with caplog.at_level(logging.WARNING):
        assert native_codecs.compile_codecs() is None
    assert caplog.messages[0].startswith("Steps with narrow moments on the host are slow: false compiles no codecs")
    assert len(caplog.messages) == 1


def test_the_source_is_a_part_of_the_package():
    pyproject = Path(__file__).parents[3].joinpath("pyproject.toml").read_text()
    assert '"**/*.c"' in pyproject
