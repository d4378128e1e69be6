"""Peaks of an allocator, phase by phase."""

import torch

from lightning_vram.memory.device.allocator import AllocatorBytes, PeakWatch
from lightning_vram.memory.tracking.timeline import Phase


class PhasePeaks:
    """Read and reset the allocator's peaks at each change of phase: others need a :class:`PeakWatch` meanwhile."""

    def __init__(self, device: torch.device) -> None:
        self._watch = PeakWatch(device)
        self._phase: Phase | None = None
        self.by_phase: dict[Phase, int] = {}
        self.peak_allocated_bytes = 0
        self.peak_reserved_bytes = 0

    def switch(self, phase: Phase) -> None:
        """End the running phase and begin another."""
        self.read()
        self._phase = phase

    def read(self) -> AllocatorBytes:
        """Add up to now to the running phase; what was before the first phase counts for the whole only."""
        now = self._watch.read()
        if self._phase is not None:
            self.by_phase[self._phase] = max(self.by_phase.get(self._phase, 0), now.peak_allocated_bytes)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, now.peak_allocated_bytes)
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, now.peak_reserved_bytes)
        self._watch.restart()
        return now
