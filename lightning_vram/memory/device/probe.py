"""Read memory around one batch, from the allocator, the tracker or both."""

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from lightning_vram.memory.device.measurement import Measurement
from lightning_vram.memory.device.phase_peaks import PhasePeaks
from lightning_vram.memory.tracking.timeline import MemoryTimeline, Phase
from lightning_vram.memory.tracking.tracker import track_memory


class MemoryProbe:
    """One reading: :meth:`start`, :meth:`switch` at changes of phase, then :meth:`finish` or :meth:`abort`."""

    def __init__(self, device: torch.device, peaks: PhasePeaks | None, *, track: bool) -> None:
        self._device = device
        self._peaks = peaks
        self.is_tracking = track
        self._exit = ExitStack()
        self.timeline: MemoryTimeline | None = None  # of what was tracked, at the end

    def start(self, module: nn.Module, optimizers: Iterable[Optimizer], inputs: Any) -> None:
        """Begin, with the forward."""
        self.switch(Phase.FORWARD)
        if self._peaks is not None:
            # Manual optimization runs several forwards in a batch: after a step it is the next one's turn.
            self._exit.callback(register_optimizer_step_post_hook(lambda *_: self.switch(Phase.FORWARD)).remove)
        if self.is_tracking:
            self._tracker = track_memory(module, optimizers=optimizers, inputs=inputs)
            self._exit.enter_context(self._tracker)

    def switch(self, phase: Phase) -> None:
        """Say that another phase begins. The tracker finds that out by itself."""
        if self._peaks is not None:
            self._peaks.switch(phase)

    def finish(self, stage: str, epoch: int, batch_idx: int, step: int) -> Measurement | None:
        """End, and say what was read; ``None`` if neither source was there."""
        self._exit.close()
        self.timeline = timeline = self._tracker.timeline if self.is_tracking else None
        where = {"stage": stage, "epoch": epoch, "batch_idx": batch_idx, "step": step}
        if self._peaks is not None:
            now = self._peaks.read()
            measurement = Measurement(
                **where,  # type: ignore[arg-type]
                device=str(self._device),
                source="allocator",
                allocated_bytes=now.allocated_bytes,
                peak_allocated_bytes=self._peaks.peak_allocated_bytes,
                reserved_bytes=now.reserved_bytes,
                peak_reserved_bytes=self._peaks.peak_reserved_bytes,
                peak_by_phase={str(phase): peak for phase, peak in self._peaks.by_phase.items()},
            )
            return measurement.with_timeline(timeline) if timeline is not None else measurement
        if timeline is None:
            return None
        return Measurement(
            **where,  # type: ignore[arg-type]
            device=timeline.device,
            source="tracker",
            allocated_bytes=timeline.live_bytes,
            peak_allocated_bytes=timeline.peak_bytes,
            peak_by_phase={str(phase): peak for phase, peak in timeline.peak_by_phase.items()},
        ).with_timeline(timeline)

    def abort(self) -> None:
        """End without a reading: the batch did not."""
        self._exit.close()
