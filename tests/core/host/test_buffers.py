"""Buffers are pinned in the sizes that are asked for, once, and given out again when nobody has them."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from lightning_vram.core.host.memory import HostBuffers
from lightning_vram.memory.units import MIB
from lightning_vram.private_names.dispatcher import FakeTensorMode


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
