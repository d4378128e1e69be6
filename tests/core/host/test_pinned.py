"""Host memory that CUDA is told of, and given back to it; without a GPU: in whose name, and when."""

import gc
import mmap
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lightning_vram.core.host import memory
from lightning_vram.core.host.memory import HostBuffers, make_host_tensor
from lightning_vram.memory.units import MIB
from lightning_vram.private_names.dispatcher import FakeTensorMode


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """``registered``: bytes by address; ``freed``: addresses; a ``code`` other than 0 makes it refuse."""
    noted = SimpleNamespace(registered={}, code=0, freed=[])

    def register(address: int, nbytes: int, flags: int) -> int:
        if noted.code == 0:
            noted.registered[address] = nbytes
        return noted.code

    def unregister(address: int) -> None:
        del noted.registered[address]
        noted.freed.append(address)

    fake = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(memory, "_warned", [])
    return noted


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone can leave pages out of a fork")


@pytest.fixture
def pinned(monkeypatch) -> list[Tensor]:
    """What PyTorch was asked to pin."""
    asked: list[Tensor] = []

    def pin(self: Tensor) -> Tensor:
        asked.append(self)
        return self.clone()

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    return asked


def test_cuda_is_told_of_exactly_this_memory_until_it_is_freed(runtime, pinned):
    tensor = make_host_tensor(1000, torch.bfloat16, pin_memory=True)
    address = tensor.data_ptr()
    assert runtime.registered == {address: 2000}
    assert not pinned
    view = tensor[10:]
    del tensor
    gc.collect()
    assert not runtime.freed  # a view needs it still
    del view
    gc.collect()
    assert runtime.freed == [address]


def test_what_cuda_does_not_take_stays_unpinned_with_one_warning(runtime, pinned, monkeypatch):
    runtime.code = 1
    kernels = []

    def launch(*shape: int, device: str) -> None:
        kernels.append(device)
        raise RuntimeError("CUDA error: out of memory")  # of the call before: no kernel is blamed for it

    monkeypatch.setattr(torch, "ones", launch)
    with pytest.warns(
        UserWarning,
        match=r"^CUDA could not pin 1\.00 MiB of host memory \(cudaHostRegister\): it stays unpinned, so its "
        r"copies do not overlap with computation\. Later allocations may stay unpinned, too\.$",
    ):
        tensor = make_host_tensor(2**18, torch.float32, pin_memory=True)
    assert tensor.shape == (2**18,)
    assert not pinned
    make_host_tensor(8, torch.float32, pin_memory=True)  # a warning would be an error
    del tensor
    gc.collect()
    assert not runtime.freed
    assert set(kernels) == {"cuda"}


def test_without_cuda_pytorch_pins(monkeypatch, pinned):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    make_host_tensor(8, torch.float32, pin_memory=True)
    assert [tensor.numel() for tensor in pinned] == [8]


def flags_of(address: int) -> list[str] | None:
    """Return the kernel's flags of the mapping that an address lies in, ``None`` if nothing is mapped there."""
    is_inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *values = line.split()
        if "-" in name:
            start, stop = (int(part, 16) for part in name.split("-"))
            is_inside = start <= address < stop
        elif is_inside and name == "VmFlags:":
            return values
    return None


@on_linux
def test_small_tensors_have_pages_of_their_own_that_no_fork_copies(runtime):
    tensors = [make_host_tensor(8, torch.float32, pin_memory=True) for _ in range(5)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert [address % mmap.PAGESIZE for address in addresses] == [0] * 5
    assert len(set(addresses)) == 5
    assert all("dc" in flags_of(address) for address in addresses)  # "do not copy area on fork"
    assert runtime.registered == dict.fromkeys(addresses, 32)


@on_linux
def test_memory_is_unregistered_before_it_is_unmapped(runtime, monkeypatch):
    was_mapped = []
    unregister = lambda address: was_mapped.append(flags_of(address) is not None)  # noqa: E731
    monkeypatch.setattr(torch.cuda.cudart(), "cudaHostUnregister", unregister)
    tensor = make_host_tensor(10 * mmap.PAGESIZE, torch.uint8, pin_memory=True)
    address = tensor.data_ptr()
    watched = tensor.untyped_storage()._weak_ref()  # with which torch frees memory earlier than its object
    part = tensor.untyped_storage()[: mmap.PAGESIZE]
    del tensor
    assert not was_mapped  # a part of the storage needs it still
    del part
    assert was_mapped == [True]
    assert flags_of(address) is None
    del watched


@on_linux
def test_a_forked_process_unmaps_nothing(runtime, monkeypatch):
    """It has not got this memory: other memory may lie at its addresses there."""
    tensor = make_host_tensor(8, torch.float32, pin_memory=True)
    address = tensor.data_ptr()
    monkeypatch.setattr(memory, "_never_unmapped", [])
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        del tensor
    assert flags_of(address) is not None


def addresses(*tensors: Tensor) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def test_what_is_pinned_is_what_was_asked_for(runtime: SimpleNamespace) -> None:
    buffers = HostBuffers(pin_memory=True)
    numels = [5 * 2**18 + 1, 3 * 2**19 + 7, 2**20 + 1, 9]  # of which powers of two would make 1.5 times as much
    taken = [buffers.take(numel, torch.float32) for numel in numels]
    assert [(tensor.shape, tensor.dtype) for tensor in taken] == [((numel,), torch.float32) for numel in numels]
    assert runtime.registered == dict(zip(addresses(*taken), [4 * numel for numel in numels], strict=True))
    assert buffers.total_bytes == 4 * sum(numels)


def test_each_step_has_the_memory_of_the_first(runtime: SimpleNamespace) -> None:
    buffers = HostBuffers(pin_memory=True)
    gradients = [buffers.take(numel, torch.float32) for numel in (300, 100, 200)]
    first = addresses(*gradients)
    for _ in range(3):
        gradients.clear()
        gradients += [buffers.take(numel, torch.float32) for numel in (300, 100, 200)]
        assert addresses(*gradients) == first
    assert sum(runtime.registered.values()) == 4 * 600


def test_what_somebody_has_a_part_of_goes_to_nobody_else(runtime: SimpleNamespace) -> None:
    buffers = HostBuffers(pin_memory=True)
    parameter = nn.Parameter(torch.zeros(10, 5))
    flat = buffers.take(100, torch.float32)
    parameter.grad = torch.split(flat, [50, 50])[0].view(10, 5).fill_(3)
    address = flat.data_ptr()
    del flat
    gc.collect()
    other = buffers.take(100, torch.float32).fill_(7)
    assert other.data_ptr() != address
    assert torch.equal(parameter.grad, torch.full((10, 5), 3.0))
    parameter.grad = None
    assert buffers.take(100, torch.float32).data_ptr() == address


def test_the_smallest_that_is_large_enough_is_given(runtime: SimpleNamespace) -> None:
    buffers = HostBuffers(pin_memory=True)
    sizes = addresses(*[buffers.take(numel, torch.uint8) for numel in (4096,)], buffers.take(2 * MIB, torch.uint8))
    large = buffers.take(MIB, torch.bfloat16)
    assert addresses(large) == sizes[1:]
    assert large.shape == (MIB,)
    assert addresses(buffers.take(1000, torch.float32)) == sizes[:1]
    assert len(runtime.registered) == 2


def test_what_later_backwards_do_not_need_is_given_back(runtime: SimpleNamespace) -> None:
    buffers = HostBuffers(pin_memory=True)
    wide = [buffers.take(100, torch.float32) for _ in range(3)]
    held, wide = wide[0], []
    for _ in range(9):
        assert buffers.total_bytes == 1200  # not at once: a later backward may need more again
        buffers.take(100, torch.bfloat16)
        buffers.end_backward()
    assert buffers.total_bytes == 800  # what is held, and what is taken each time
    del held
    for _ in range(8):
        buffers.take(100, torch.bfloat16)
        buffers.end_backward()
    assert buffers.total_bytes == 400


def test_closed_all_is_given_back_but_what_somebody_has(runtime: SimpleNamespace) -> None:
    buffers = HostBuffers(pin_memory=True)
    kept, gone = buffers.take(100, torch.float32).fill_(5), buffers.take(200, torch.float32)
    del gone
    buffers.close()
    gc.collect()
    assert list(runtime.registered) == addresses(kept)
    assert torch.equal(kept, torch.full((100,), 5.0))
    assert buffers.total_bytes == 0
    del kept
    gc.collect()
    assert not runtime.registered


def test_fake_and_empty_tensors_are_those_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *args, pin_memory, **kwargs: asked.append(pin_memory) or empty(*args, **kwargs)
    )
    buffers = HostBuffers(pin_memory=True)
    assert buffers.take(0, torch.float32).numel() == 0
    with FakeTensorMode():
        buffers.take(3, torch.float32)
    assert asked == [True, True]
    assert buffers.total_bytes == 0
