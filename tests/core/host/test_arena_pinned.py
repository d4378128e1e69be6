"""Memory that CUDA is told of, and given back to it; without a GPU: in whose name, and when."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from lightning_vram.core.host import arena
from lightning_vram.core.host.arena import make_host_tensor


@pytest.fixture
def pinned(monkeypatch) -> list[Tensor]:
    """What PyTorch was asked to pin."""
    asked: list[Tensor] = []

    def pin(self: Tensor) -> Tensor:
        asked.append(self)
        return self.clone()

    monkeypatch.setattr(Tensor, "pin_memory", pin)
    return asked


@pytest.fixture
def runtime(monkeypatch) -> SimpleNamespace:
    """A CUDA runtime that takes notes."""
    noted = SimpleNamespace(registered={}, code=0, freed=[])

    def register(address: int, nbytes: int, flags: int) -> int:
        noted.registered[address] = (nbytes, flags)
        return noted.code

    monkeypatch.setattr(arena, "_warned", [])
    fake = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=noted.freed.append)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return noted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ordinary_memory_is_flat_and_of_the_size_asked_for(dtype, runtime, pinned):
    tensor = make_host_tensor(1000, dtype, pin_memory=False)
    assert (tensor.shape, tensor.dtype, tensor.device.type) == ((1000,), dtype, "cpu")
    assert not runtime.registered
    assert not pinned


def test_cuda_is_told_of_exactly_this_memory_until_it_is_freed(runtime, pinned):
    tensor = make_host_tensor(1000, torch.bfloat16, pin_memory=True)
    address = tensor.data_ptr()
    assert runtime.registered == {address: (2000, 0)}
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
    monkeypatch.setattr(torch, "ones", lambda *shape, device: None)
    with pytest.warns(
        UserWarning,
        match=r"^CUDA could not pin 1\.00 MiB of host memory \(cudaHostRegister\): it stays unpinned, and so may what "
        r"is taken after it\. Copies from and to it do not go on beside the computation\.$",
    ):
        tensor = make_host_tensor(2**18, torch.float32, pin_memory=True)
    assert tensor.shape == (2**18,)
    assert not pinned
    make_host_tensor(8, torch.float32, pin_memory=True)  # a warning would be an error
    del tensor
    gc.collect()
    assert not runtime.freed


def test_without_cuda_pytorch_pins(monkeypatch, pinned):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    make_host_tensor(8, torch.float32, pin_memory=True)
    assert [tensor.numel() for tensor in pinned] == [8]


def test_nothing_needs_no_pinning(runtime, pinned):
    assert make_host_tensor(0, torch.float32, pin_memory=True).numel() == 0
    assert not runtime.registered
    assert not pinned


def test_no_kernel_is_blamed_for_what_cuda_does_not_take(runtime, pinned, monkeypatch):
    runtime.code = 1
    kernels = []

    def launch(*shape: int, device: str) -> None:
        kernels.append(device)
        raise RuntimeError("CUDA error: out of memory")  # of the call before

    monkeypatch.setattr(torch, "ones", launch)
    with pytest.warns(UserWarning, match=r"^CUDA could not pin 32 B of host memory"):
        make_host_tensor(8, torch.float32, pin_memory=True)
    assert kernels == ["cuda"]
