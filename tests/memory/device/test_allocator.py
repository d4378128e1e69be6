"""The caching allocator, faked where there is no GPU and real where there is one."""

import pytest
import torch
from support.devices import DEVICE, device_module

from lightning_vram.memory.device.accelerators import AllocatorBytes, PhasePeaks, empty_cache, has_cache, read_allocator
from lightning_vram.memory.tracking.timeline import Phase
from lightning_vram.memory.units import MIB

CUDA = torch.device("cuda", 0)
REAL = torch.device(DEVICE, 0)
CPU = torch.device("cpu")


def test_no_cache_on_cpu():
    assert not has_cache(CPU)
    assert empty_cache(CPU) == 0
    with pytest.raises(ValueError, match=r"^device 'cpu' has no caching allocator with statistics"):
        read_allocator(CPU)


def test_returns_the_drop_in_reserved_memory(monkeypatch):
    reserved_bytes = iter([100 * MIB, 36 * MIB])
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: next(reserved_bytes))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert empty_cache(CUDA) == 64 * MIB




class FakeAllocator:
    """An allocator that does what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocated = self.peak = 0
        for name in ("memory_allocated", "memory_reserved"):
            monkeypatch.setattr(torch.cuda, name, lambda device: self.allocated)
        for name in ("max_memory_allocated", "max_memory_reserved"):
            monkeypatch.setattr(torch.cuda, name, lambda device: self.peak)
        monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", self._reset)

    def reach(self, peak: int, then: int) -> None:
        self.peak = max(self.peak, peak)
        self.allocated = then

    def _reset(self, device: torch.device) -> None:
        self.peak = self.allocated


def test_peaks_belong_to_the_phase_they_happened_in(monkeypatch):
    allocator = FakeAllocator(monkeypatch)
    peaks = PhasePeaks(CUDA)
    allocator.reach(90, then=10)  # before any phase: counts for the whole only
    peaks.switch(Phase.FORWARD)
    allocator.reach(50, then=40)
    peaks.switch(Phase.BACKWARD)
    allocator.reach(70, then=20)
    peaks.switch(Phase.FORWARD)
    allocator.reach(60, then=30)
    peaks.switch(Phase.OPTIMIZER_STEP)
    now = peaks.read()
    assert peaks.by_phase == {Phase.FORWARD: 60, Phase.BACKWARD: 70, Phase.OPTIMIZER_STEP: 30}
    assert (peaks.peak_allocated_bytes, peaks.peak_reserved_bytes) == (90, 90)
    assert now.allocated_bytes == 30




