"""LiveBytes: the host's memory to the byte and a bit."""

import platform

import pytest
import torch

from lightning_vram.memory.leaks import LiveBytes
from lightning_vram.memory.units import KIB, MIB

HOST = torch.device("cpu")
is_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")


@is_glibc
@pytest.mark.parametrize("size", [64 * KIB, 8 * MIB])
def test_counts_what_is_alive(size):
    counter = LiveBytes(HOST)
    before = counter.read()["cpu"]
    tensor = torch.empty(size, dtype=torch.uint8)
    there = counter.read()["cpu"]
    del tensor
    assert there - before == pytest.approx(size, abs=8 * KIB)
    assert counter.read()["cpu"] - before == pytest.approx(0, abs=8 * KIB)


@pytest.mark.device
def test_counts_a_device():
    from support.devices import DEVICE

    counter = LiveBytes(torch.device(DEVICE, 0))
    name = str(torch.device(DEVICE, 0))
    before = counter.read()[name]
    tensor = torch.empty(MIB, dtype=torch.uint8, device=DEVICE)
    assert counter.read()[name] - before == tensor.nbytes
