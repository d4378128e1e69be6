"""The room of a device, faked where there is no GPU and real where there is one."""

import pytest
import torch
from support.devices import DEVICE, device_module

from lightning_vram.memory.device.accelerators import (
    PeakWatch,
    PhasePeaks,
    empty_cache,
    free_device_bytes,
    has_cache,
    read_allocator,
    reset_peaks,
)
from lightning_vram.memory.tracking.timeline import Phase
from lightning_vram.memory.units import GIB, MIB

CUDA = torch.device("cuda", 0)
OTHER = torch.device("cuda", 1)
CPU = torch.device("cpu")


class FakeDevice:
    """A device of 80 GiB that holds what it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = 10 * GIB
        self.reserved = 15 * GIB
        self.free = 60 * GIB
        self.fraction = 1.0
        for name, read in {
            "memory_allocated": lambda device: self.allocated,
            "memory_reserved": lambda device: self.reserved,
            "max_memory_allocated": lambda device: self.peak,
            "max_memory_reserved": lambda device: self.reserved,
            "reset_peak_memory_stats": self._reset,
            "mem_get_info": lambda device: (self.free, 80 * GIB),
            "get_per_process_memory_fraction": lambda device: self.fraction,
        }.items():
            monkeypatch.setattr(torch.cuda, name, read)

    def reach(self, peak: int, then: int) -> None:
        self.peak, self.allocated = max(self.peak, peak), then

    def _reset(self, device: torch.device) -> None:
        if device == CUDA:
            self.peak = self.allocated


@pytest.fixture
def fake(monkeypatch):
    return FakeDevice(monkeypatch)


def test_devices_without_an_allocator_have_no_room():
    assert free_device_bytes(CPU) is None
    assert not has_cache(CPU)
    assert empty_cache(CPU) == 0
    for read in (PeakWatch, read_allocator):
        with pytest.raises(ValueError, match=r"^device 'cpu' has no caching allocator with statistics"):
            read(CPU)


def test_emptying_the_cache_returns_the_drop_in_reserved_memory(fake, monkeypatch):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: setattr(fake, "reserved", 11 * GIB))
    assert empty_cache(CUDA) == 4 * GIB


def test_peaks_belong_to_the_phase_they_happened_in(fake):
    peaks = PhasePeaks(CUDA)
    fake.reach(90 * GIB, then=10 * GIB)  # before any phase: counts for the whole only
    peaks.switch(Phase.FORWARD)
    fake.reach(50 * GIB, then=40 * GIB)
    peaks.switch(Phase.BACKWARD)
    fake.reach(70 * GIB, then=20 * GIB)
    peaks.switch(Phase.FORWARD)
    fake.reach(60 * GIB, then=30 * GIB)
    peaks.switch(Phase.OPTIMIZER_STEP)
    now = peaks.read()
    assert peaks.by_phase == {Phase.FORWARD: 60 * GIB, Phase.BACKWARD: 70 * GIB, Phase.OPTIMIZER_STEP: 30 * GIB}
    assert (peaks.peak_allocated_bytes, peaks.peak_reserved_bytes) == (90 * GIB, 15 * GIB)
    assert now.allocated_bytes == 30 * GIB


@pytest.mark.parametrize(("fraction", "room_gib"), [(1.0, 65), (0.5, 30), (0.1, 0)])
def test_room_ends_at_the_share_of_this_process(fake, fraction, room_gib):
    fake.fraction = fraction
    assert free_device_bytes(CUDA) == room_gib * GIB


def test_peaks_survive_those_of_others(fake):
    room, watch = PeakWatch(CUDA), PeakWatch(CUDA)
    room.restart()
    fake.reach(30 * GIB, then=12 * GIB)
    reset_peaks(CUDA)  # a phase ends
    fake.reach(20 * GIB, then=12 * GIB)
    watch.restart()
    assert room.read().peak_allocated_bytes == 30 * GIB
    assert watch.read().peak_allocated_bytes == 12 * GIB
    fake.reach(25 * GIB, then=11 * GIB)
    room.restart()
    assert room.read().peak_allocated_bytes == 11 * GIB
    assert watch.read().peak_allocated_bytes == 25 * GIB
    assert watch.read().allocated_bytes == 11 * GIB


@pytest.mark.device
def test_the_room_of_a_real_device():
    device = torch.device(DEVICE, 0)
    room = PeakWatch(device)
    device_module().empty_cache()
    room.restart()
    start, before = read_allocator(device).allocated_bytes, free_device_bytes(device)
    block = torch.empty(64 * MIB, dtype=torch.uint8, device=device)
    assert read_allocator(device).allocated_bytes == start + 64 * MIB
    assert abs(before - free_device_bytes(device) - 64 * MIB) <= 4 * MIB  # other processes
    del block
    assert room.read().peak_allocated_bytes == start + 64 * MIB
    assert abs(before - free_device_bytes(device)) <= 4 * MIB  # it is cached now
