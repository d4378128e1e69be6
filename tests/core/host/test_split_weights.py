"""Weights that are split are those that travel today and come back to the bit, whatever they are."""

import torch
from torch import Tensor

from lightning_vram.core.host import memory
from lightning_vram.core.host.memory import PART_ELEMENTS, SplitWeights


def split(numbers: Tensor, *sizes: int) -> SplitWeights:
    weights = SplitWeights(sizes or [numbers.numel()], pin_memory=False)
    weights.write_all(numbers)
    return weights


def bits(numbers: Tensor) -> Tensor:
    return numbers.contiguous().view(torch.int32 if numbers.dtype == torch.float32 else torch.int16)


def test_every_upper_half_comes_back():
    """NaNs with their payload, infinities, both zeros, subnormals, what rounds to infinity: all there is."""
    for lower in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):  # each side of a half, and of nothing
        patterns = torch.arange(-0x8000, 0x8000, dtype=torch.int32).bitwise_left_shift(16).bitwise_or(lower)
        assert torch.equal(bits(split(patterns.view(torch.float32)).read_all()), patterns)


def test_all_lower_halves_come_back():
    for upper in (0x3F80, 0x3F81, 0x0000, 0x0001, 0x7F7F, 0x7F80, 0xFF80, 0x7FC0):  # even, odd, the ends
        signed = upper - 0x10000 if upper >= 0x8000 else upper
        patterns = torch.arange(0x10000, dtype=torch.int32).bitwise_or(signed << 16)
        assert torch.equal(bits(split(patterns.view(torch.float32)).read_all()), patterns)


def test_what_travels_is_what_a_conversion_makes():
    patterns = torch.randint(-(2**31), 2**31, (200_000,), generator=torch.Generator().manual_seed(0)).int()
    numbers = patterns.view(torch.float32)
    upper, expected = split(numbers).upper, numbers.bfloat16()
    assert torch.equal(bits(upper), bits(expected))


def test_a_half_that_is_rounded_down_is_all_that_takes_more_than_four_bytes():
    halves = torch.tensor([0x3F808000, 0x3F818000, 0x3F807FFF, 0x3F808001], dtype=torch.int32)
    numbers = torch.cat([torch.ones(96), halves.view(torch.float32)])
    weights = split(numbers)
    assert torch.equal(bits(weights.upper)[96:], torch.tensor([0x3F80, 0x3F82, 0x3F80, 0x3F81], dtype=torch.int16))
    assert torch.equal(weights.read_all(), numbers)
    assert weights.nbytes == 4 * 100 + 6  # the first of them: its place, and its upper half
    weights.write_all(torch.ones(100))
    assert weights.nbytes == 4 * 100
    weights.write_all(numbers[96].expand(100))  # a list of all would be longer than all upper halves
    assert torch.equal(weights.read_all(), numbers[96].expand(100))
    assert weights.nbytes == 6 * 100


def test_parts_are_read_and_written_by_themselves(monkeypatch):
    monkeypatch.setattr(memory, "PART_ELEMENTS", 4)
    numbers = torch.randn(11, generator=torch.Generator().manual_seed(0))
    weights = split(numbers, 9, 0, 2)
    assert weights.parts == [[(0, 4), (4, 8), (8, 9)], [(9, 9)], [(9, 11)]]
    assert torch.equal(weights.read((4, 8)), numbers[4:8])
    half = torch.tensor([0x3F808000] * 1 + [0x3F800000] * 3, dtype=torch.int32).view(torch.float32)
    weights.write((4, 8), half)
    weights.write((9, 9), torch.empty(0))
    expected = numbers.clone()
    expected[4:8] = half
    assert torch.equal(weights.read_all(), expected)


def test_a_part_is_cut_where_kernels_round_alike():
    assert PART_ELEMENTS % 4096 == 0
