"""Sixteen bits and the rest: what comes back."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_vram.core.tensors.codecs import add_compensation_, compensate_, join_, rounded_by_place, split_

patterns = st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=32)
pairs = st.lists(st.tuples(st.integers(-(2**15), 2**15 - 1), st.integers(-(2**15), 2**15 - 1)), min_size=1, max_size=32)
ODD = [0, 1, 0x7FFF, 0x8000, 0x8001, 0x3F808000, 0x3F818000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF]
ODD += [0x3F807FFF, 0x3F817FFF, 0x3F818001]  # around the halves beside even and odd numbers
ODD += [bits - 2**31 for bits in ODD]


def numbers_of(bits: list[int]) -> Tensor:
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def same(one: Tensor, other: Tensor) -> bool:
    """Equal to the bit, but for the patterns of NaNs."""
    nan = one.isnan()
    return torch.equal(nan, other.isnan()) and torch.equal(one[~nan].view(torch.int32), other[~nan].view(torch.int32))


def check_split(numbers: Tensor) -> None:
    work, lower = numbers.clone(), torch.empty(numbers.shape, dtype=torch.int16)
    split_(work, lower)
    upper = work.bfloat16()
    assert same(upper.float(), work)
    assert torch.equal(upper.isnan(), numbers.isnan())
    joined = upper.float()
    join_(joined, lower)
    assert same(joined, torch.where(upper == 0, upper.float(), numbers))


def check_sum(numbers: Tensor) -> None:
    compensation = torch.empty(numbers.shape, dtype=torch.bfloat16)
    nearest = compensate_(numbers.clone(), compensation)
    decoded = nearest.float()
    add_compensation_(decoded, compensation)
    # None of them is taken for a stranger's.
    assert torch.equal(decoded.nan_to_num(7.0), nearest.float().add_(compensation).nan_to_num(7.0))
    again = torch.empty_like(compensation)
    assert torch.equal(compensate_(decoded.clone(), again).nan_to_num(7.0), nearest.nan_to_num(7.0))
    assert torch.equal(again, compensation)
    assert torch.equal(decoded.isnan(), numbers.isnan())
    fits = nearest.isfinite()
    assert ((decoded - numbers)[fits].abs() <= numbers[fits].abs() * 2**-17 + 2**-133).all()


@settings(deadline=None)
@given(patterns)
def test_split_numbers_join_to_the_bit(bits):
    check_split(numbers_of(bits))


@settings(deadline=None)
@given(patterns)
def test_sums_come_back_as_the_same_two_numbers(bits):
    check_sum(numbers_of(bits))


EDGES = [0, 1, 0x7F, 0x80, 0x81, 0x3F7F, 0x3F80, 0x3F81, 0x7F7F, 0x7F80, 0x7F81, 0x7FC0, 0x7FFF]
RESTS = [-0x8000, -0x7FFF, -1, 0, 1, 0x7FFF, 0x3800, 0x3F80, 0x7F80, 0x7FC0]


def check_strangers(written: list[int], rests: list[int]) -> None:
    """Numbers written over others, whose rest is still there, must move by half a unit in the last place at most."""
    numbers = numbers_of([bits << 16 for bits in written])
    rest = torch.tensor(rests, dtype=torch.int16)
    magnitude = numbers.abs().double()
    _, exponent = torch.frexp(magnitude)
    half_unit = torch.ldexp(torch.ones_like(magnitude), (exponent - 9).clamp(min=-134))
    for join in (join_, lambda joined, rest: add_compensation_(joined, rest.view(torch.bfloat16))):
        joined = numbers.clone()
        join(joined, rest)
        assert torch.equal(joined.isnan(), numbers.isnan())
        assert torch.equal(joined[numbers == 0], numbers[numbers == 0])
        assert torch.equal(joined[numbers.isinf()].bfloat16(), numbers[numbers.isinf()])
        inner = numbers.isfinite()
        assert ((joined.double() - numbers.double()).abs() <= half_unit)[inner].all()
        assert torch.equal(joined[inner].sign(), numbers[inner].sign())


@settings(deadline=None)
@given(pairs)
def test_what_was_kept_for_another_number_moves_this_one_by_half_a_unit_at_most(some):
    check_strangers(*map(list, zip(*some, strict=True)))


def test_zeros_infinities_nans_and_the_borders_of_exponents_stay_within_half_a_unit():
    written = [bits - sign for bits in EDGES for sign in (0, 2**15) for _ in RESTS]
    check_strangers(written, RESTS * (2 * len(EDGES)))


def test_ties_infinities_nans_and_denormal_numbers_come_back():
    check_split(numbers_of(ODD))
    check_sum(numbers_of(ODD))


@pytest.mark.parametrize("upper", [0, 1, 0x3F80, 0x3F81, 0x7F7E])
def test_a_split_rounds_as_a_conversion_but_for_halves_beside_an_even_number(upper):
    """Of all numbers that share an upper half: away from zero there, where all must come back."""
    numbers = numbers_of([(upper << 16) + lower for lower in range(0x10000)])
    for signed in (numbers, -numbers):
        check_split(signed)
        work, lower = signed.clone(), torch.empty(signed.shape, dtype=torch.int16)
        split_(work, lower)
        differs = (work.bfloat16() != signed.bfloat16()).nonzero().flatten().tolist()
        assert differs == ([] if upper % 2 else [0x8000])
        assert (work[0x8000].abs() > signed[0x8000].abs()).item()


@settings(deadline=None)
@given(patterns)
def test_rounding_by_place_keeps_what_fits_and_is_the_same_in_any_parts(bits):
    fitting = numbers_of([bit & -0x10000 for bit in bits])
    assert same(rounded_by_place(fitting.clone(), 3, 11).float(), fitting)
    whole = rounded_by_place(numbers_of(bits), 70_000, 5).float()
    middle = len(bits) // 2
    parts = numbers_of(bits)
    halves = rounded_by_place(parts[:middle], 70_000, 5), rounded_by_place(parts[middle:], 70_000 + middle, 5)
    assert same(whole, torch.cat(halves).float())
    assert torch.equal(whole.isnan(), numbers_of(bits).isnan())


def test_a_draw_is_that_of_its_place_and_seed():
    for first, seed in ((0, 0), (70_000, 5), (2**40 + 3, 65_535)):
        found = rounded_by_place(numbers_of([0x3F800000 + draw for draw in range(0, 2**16, 7)]), first, seed)
        draws = [((first + place) * 40503 + seed) % 2**16 for place in range(found.numel())]
        expected = [7 * place + draw >= 2**16 for place, draw in enumerate(draws)]
        assert (found > 1).tolist() == expected
