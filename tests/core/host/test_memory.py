"""Host memory is taken once, used again and refused when there is too little; split weights come back to the bit."""

import gc
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from lightning_vram.core.host import memory
from lightning_vram.core.host.memory import PART_ELEMENTS, ChunkedSpace, HostArena, SplitWeights
from lightning_vram.memory.units import GIB, KIB, MIB


@pytest.fixture
def arena() -> HostArena:
    return HostArena(pin_memory=False)


class Ranges(ChunkedSpace[range]):
    """Space that is nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def _make_chunks(self, sizes: list[int]) -> list[range]:
        self.made += sizes
        return [range(size) for size in sizes]

    def _cut(self, space: range, start: int, num_bytes: int) -> range:
        return space[start : start + num_bytes]


def test_chunks_double_up_to_64_mib() -> None:
    space = Ranges()
    block = space.take(MIB)
    assert space.made == [MIB]
    other = space.take(200 * MIB)
    assert [size // MIB for size in space.made] == [1, 2, 4, 8, 16, 32, 64, 64, 64]
    assert space.total_bytes == 255 * MIB
    assert [len(piece) // MIB for piece in other.pieces] == [2, 4, 8, 16, 32, 64, 64, 10]
    assert block.pieces[0].start == 0


def test_blocks_do_not_overlap_and_begin_where_any_dtype_may(arena) -> None:
    generator = random.Random(0)
    blocks = []
    for number in range(100):
        block = arena.take(generator.randrange(1, 40 * KIB))
        for piece in block.pieces:
            piece.fill_(number % 251)
            assert piece.storage_offset() % 64 == 0
        blocks.append((number % 251, block))
        if generator.random() < 0.4:
            blocks.pop(generator.randrange(len(blocks)))
        for value, other in blocks:
            assert all(bool((piece == value).all()) for piece in other.pieces)
    assert arena.num_blocks == len(blocks)


def test_memory_is_used_again_when_the_last_of_a_chunk_is_gone(arena) -> None:
    one, two, three = (arena.take(512 * KIB) for _ in range(3))
    assert arena.total_bytes == 3 * MIB
    place = one.pieces[0].data_ptr()
    del one
    four = arena.take(MIB)
    assert four.pieces[0].data_ptr() != place  # two is still there
    del two
    assert arena.num_blocks == 2
    five = arena.take(MIB)
    assert five.pieces[0].numel() == 512 * KIB  # the rest of the second chunk, then the first again
    assert five.pieces[1].data_ptr() == place
    assert arena.total_bytes == 3 * MIB
    assert three.pieces[0].numel() == 512 * KIB


def test_blocks_may_die_in_any_thread(arena) -> None:
    def work(seed: int) -> None:
        generator = random.Random(seed)
        for _ in range(200):
            in_step.wait()  # one that lags behind would hold on to an old chunk while the others fill the next
            block = arena.take(generator.randrange(1, 10000))
            block.pieces[0].fill_(seed)
            held.append(block)
            if len(held) > 5:
                held.pop(0)

    held, in_step = [], threading.Barrier(4, timeout=60)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    held.clear()
    assert arena.num_blocks == 0
    assert arena.total_bytes <= 3 * MIB  # one chunk is filled while the last of the one before dies


def test_a_host_that_is_too_small_is_refused_and_nothing_is_taken(arena, monkeypatch) -> None:
    held = arena.take(10)
    monkeypatch.setattr(memory, "available_host_bytes", lambda: GIB + 5 * MIB)
    message = (
        "activation offload needs 6.00 MiB of host memory in addition to 1.00 MiB, but 1.00 GiB are available, of "
        "which 1.00 GiB must stay free. Set disk_path to a folder on a fast disk, set "
        'compress="bf16", use a smaller batch, or add ActivationCheckpointing.'
    )
    with pytest.raises(RuntimeError) as error:
        arena.take(6 * MIB)
    assert str(error.value) == message
    assert (arena.total_bytes, arena.num_blocks) == (MIB, 1)
    assert arena.take(2 * MIB).pieces[0].numel() == MIB - 64
    assert held.pieces[0].numel() == 10
    monkeypatch.setattr(memory, "available_host_bytes", lambda: None)  # unknown: the user knows better
    assert arena.take(6 * MIB) is not None


def test_closed_it_has_nothing_and_what_lies_there_can_be_read(arena) -> None:
    block = arena.take(4)
    block.pieces[0].fill_(7)
    chunk = weakref.ref(block.pieces[0].untyped_storage())
    arena.close()
    assert (arena.total_bytes, arena.num_blocks) == (0, 0)
    assert block.pieces[0].tolist() == [7] * 4
    gc.disable()
    del block
    assert chunk() is None
    gc.enable()


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
