"""Numbers in 8 and 4 bits: how far off they are, and that they are encoded to the same bytes again."""

import pytest
import torch

from lightning_vram.techniques.quantize_frozen_weights import packing as module
from lightning_vram.techniques.quantize_frozen_weights.packing import Packing

PACKINGS = [Packing(bits, size) for bits in (8, 4) for size in (16, 64, 256)]
WIDEST_GAP = 1 - 0.6961928009986877  # between levels of NF4


def encode(packing, numbers):
    packed = packing.empty(numbers.numel(), numbers.device)
    packing.encode(numbers, packed)
    return packed


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_are_off_by_half_a_step_at_most_and_keep_their_bytes(packing, dtype):
    numbers = torch.randn(3, 1000).to(dtype)
    packed = encode(packing, numbers)
    decoded = packing.decode(packed, 3000, dtype)
    assert (decoded.dtype, decoded.shape, packed.shape) == (
        dtype,
        (3000,),
        (-(-3000 // packing.block_size), packing.block_size * packing.bits // 8 + 4),
    )
    blocks, off = (
        torch.nn.functional.pad(each.float(), (0, -3000 % packing.block_size)).view(-1, packing.block_size)
        for each in (numbers.view(-1), decoded.float() - numbers.view(-1).float())
    )
    largest = blocks.abs().amax(1, keepdim=True)
    step = 1 / 127 if packing.bits == 8 else 1.1 * WIDEST_GAP  # of the largest scale
    assert (off.abs() <= largest * (step / 2 + torch.finfo(dtype).eps)).all()
    assert torch.equal(packing.decode(encode(packing, decoded), 3000, dtype), decoded)
    if dtype is torch.float32:
        assert torch.equal(encode(packing, decoded), packed)


@pytest.mark.parametrize(("size", "share"), [(16, 0.83), (64, 0.89), (256, 0.92)])
def test_scales_of_four_bits_are_those_of_less_error(size, share, monkeypatch):
    numbers, packing = torch.randn(1 << 16), Packing(4, size)
    fitted, factor = encode(packing, numbers), 60_000 / numbers.abs().max()
    assert packing.decode(encode(packing, numbers * factor), 1 << 16, torch.float16).isfinite().all()
    monkeypatch.setattr(module, "_SHARES", (1.0,))
    errors = [
        (packing.decode(packed, 1 << 16, torch.float32) - numbers).square().mean()
        for packed in (fitted, encode(packing, numbers))
    ]
    assert errors[0] < share * errors[1]


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_parts_are_the_whole(packing, monkeypatch):
    numbers = torch.randn(5000)
    packed = encode(packing, numbers)
    whole = packing.decode(packed, 5000, torch.float32)
    monkeypatch.setattr(module, "_PART", 512)
    assert torch.equal(encode(packing, numbers), packed)
    assert torch.equal(packing.decode(packed, 5000, torch.float32), whole)


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_stay_and_what_is_not_finite_spoils_its_block_alone(bits):
    packing, numbers = Packing(bits, 16), torch.randn(64)
    numbers[:16], numbers[20], numbers[40] = 0, torch.inf, torch.nan
    decoded = packing.decode(encode(packing, numbers), 64, torch.float32).view(4, 16)
    assert torch.equal(decoded[0], torch.zeros(16))
    assert decoded[1:3].isnan().all()
    assert decoded[3].isfinite().all()


def test_levels_are_those_of_nf4():
    numbers = torch.tensor(module._NF4).repeat(4)
    decoded = Packing(4, 16).decode(encode(Packing(4, 16), numbers * 3), 64, torch.float32)
    assert torch.equal(decoded, numbers * 3)
