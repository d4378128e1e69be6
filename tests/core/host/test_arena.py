"""Host memory is taken once, used again, refused when there is too little, and given back."""

import gc
import random
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from lightning_vram.core.host import memory
from lightning_vram.core.host.memory import ChunkedSpace, HostArena
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


def test_fake_memory_is_on_the_host_and_there_is_enough(monkeypatch) -> None:
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 0)
    with FakeTensorMode():
        arena = HostArena(pin_memory=False, like=torch.empty(0, device="meta"))
        block = arena.take(100 * MIB)
    assert {type(piece) for piece in block.pieces} == {FakeTensor}
    assert {piece.device.type for piece in block.pieces} == {"cpu"}
