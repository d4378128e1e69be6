"""Memory that CUDA is told of, and given back to it; without a GPU: in whose name, and when."""

import gc
import mmap
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_vram.core.host import memory
from lightning_vram.core.host.memory import make_host_tensor
from lightning_vram.private_names.dispatcher import FakeTensor, FakeTensorMode

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


def test_fake_tensors_stay_fake(runtime, monkeypatch):
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)
    with FakeTensorMode():
        assert isinstance(make_host_tensor(2**50, torch.uint8, pin_memory=True), FakeTensor)
    assert not runtime.registered
