"""Measure the memory of batches and of stages, and reduce the measurements over the ranks."""

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torchmetrics import Metric
from typing_extensions import override

from lightning_vram.memory.device.allocator import has_cache
from lightning_vram.memory.device.measurement import SIZE_NAMES, Measurement, largest
from lightning_vram.memory.device.phase_peaks import PhasePeaks
from lightning_vram.memory.device.probe import MemoryProbe
from lightning_vram.memory.tracking.timeline import MemoryTimeline, Phase
from lightning_vram.private_names.torch.compiled import is_compiled


class Readings:
    """Measurements of one run, from setup to teardown. ``track`` is that of ``VRAMMonitor``."""

    def __init__(self, track: bool | None) -> None:  # noqa: FBT001
        self._track = track
        self._stage = "train"
        self._allocator_peaks: dict[str, PhasePeaks] = {}  # since the last reading, for each stage
        self._probe: MemoryProbe | None = None  # of the reading under way
        self._batch_idx = 0  # that it reads
        self._metric: MaxOverRanks | None = None
        self.timeline: MemoryTimeline | None = None  # of the tracked training batch with the highest peak
        self._largest: Measurement | None = None  # of a stage other than training, until it ends

    @property
    def is_tracking(self) -> bool:
        """Whether the measurement under way tracks tensors."""
        return self._probe is not None and self._probe.is_tracking

    def switch_stage(self, stage: str, trainer: pl.Trainer) -> None:
        """What runs from now on belongs to ``stage``."""
        self.abort()
        device = trainer.strategy.root_device
        if has_cache(device):
            self._peaks_of(self._stage, device).read()
        self._stage = stage

    def switch_phase(self, phase: Phase) -> None:
        """What runs from now on belongs to ``phase``."""
        if self._probe is not None:
            self._probe.switch(phase)

    def begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin to measure a batch."""
        self.abort()
        self._batch_idx = batch_idx
        device = trainer.strategy.root_device
        peaks = self._peaks_of(self._stage, device) if has_cache(device) else None
        self._probe = MemoryProbe(device, peaks, track=self._tracks(trainer))
        self._probe.start(pl_module, trainer.optimizers, batch)

    def end(self, trainer: pl.Trainer) -> Measurement | None:
        """End a batch. Returns its measurement, of all ranks, if it was measured and is one of the training."""
        if self._probe is None:
            return None
        probe, self._probe = self._probe, None
        measurement = self._finish(probe, trainer, trainer.current_epoch, self._batch_idx)
        if measurement is None:
            return None
        if self._stage == "train":
            timeline = probe.timeline
            if timeline is not None and (self.timeline is None or timeline.peak_bytes > self.timeline.peak_bytes):
                self.timeline = timeline
            return self._reduce(trainer, measurement)
        self._keep_largest(measurement)
        return None

    def end_training(self, trainer: pl.Trainer, last: Measurement | None) -> Measurement | None:
        """Return the peaks since the ``last`` measurement, of all ranks."""
        flushed = self._flush(trainer, last)
        return None if flushed is None else self._reduce(trainer, flushed)

    def end_stage(self, trainer: pl.Trainer, last: Measurement | None) -> Measurement | None:
        """Reduce once: ranks may have seen different numbers of batches, even none."""
        flushed = self._flush(trainer, last)
        if flushed is not None:
            self._keep_largest(flushed)
        found, self._largest = self._largest, None
        device = trainer.strategy.root_device
        if trainer.sanity_checking or not (has_cache(device) or self._tracks(trainer)):
            return None
        place = self._stage, trainer.current_epoch, 0, trainer.global_step, str(device)
        nothing = Measurement(*place, "tracker", -1, -1)
        measurement = self._reduce(trainer, found or nothing)
        return measurement if measurement.peak_allocated_bytes >= 0 else None

    def end_alone(self, trainer: pl.Trainer) -> tuple[Measurement | None, MemoryTimeline | None]:
        """End the measurement under way, if any, without the other ranks: they may not be there."""
        if self._probe is None:
            return None, None
        probe, self._probe = self._probe, None
        measurement = probe.finish(self._stage, trainer.current_epoch, self._batch_idx, trainer.global_step)
        return measurement, probe.timeline

    def abort(self) -> None:
        """Discard the measurement under way."""
        if self._probe is not None:
            self._probe.abort()
            self._probe = None

    def _peaks_of(self, stage: str, device: torch.device) -> PhasePeaks:
        return self._allocator_peaks.setdefault(stage, PhasePeaks(device))

    def _tracks(self, trainer: pl.Trainer) -> bool:
        wanted = not has_cache(trainer.strategy.root_device) if self._track is None else self._track
        return wanted and not is_compiled(trainer.lightning_module)

    def _finish(self, probe: MemoryProbe, trainer: pl.Trainer, epoch: int, batch_idx: int) -> Measurement | None:
        measurement = probe.finish(self._stage, epoch, batch_idx, trainer.global_step)
        self._allocator_peaks.pop(self._stage, None)
        return measurement

    def _flush(self, trainer: pl.Trainer, last: Measurement | None) -> Measurement | None:
        """Read the allocator's peaks since the last measurement."""
        self.abort()
        device = trainer.strategy.root_device
        if not has_cache(device):
            return None
        probe = MemoryProbe(device, self._peaks_of(self._stage, device), track=False)
        batch_idx = max(0, trainer.fit_loop.epoch_loop.batch_idx) if self._stage == "train" else 0
        return self._finish(probe, trainer, trainer.current_epoch if last is None else last.epoch, batch_idx)

    def _keep_largest(self, measurement: Measurement) -> None:
        self._largest = measurement if self._largest is None else largest([self._largest, measurement])

    def _reduce(self, trainer: pl.Trainer, measurement: Measurement) -> Measurement:
        """Take each size's maximum over the ranks."""
        if self._metric is None:
            self._metric = MaxOverRanks(len(SIZE_NAMES)).to(trainer.strategy.root_device)
        sizes = measurement.sizes()
        self._metric.reset()
        self._metric.update(torch.tensor([sizes.get(name, -1) for name in SIZE_NAMES]))
        maxima: list[int] = self._metric.compute().tolist()
        known = {name: size for name, size in zip(SIZE_NAMES, maxima, strict=True) if size >= 0}
        return measurement.with_sizes({"allocated_bytes": -1, "peak_allocated_bytes": -1, **known})


class MaxOverRanks(Metric):
    """Element-wise maximum of ``num_values`` integers over updates and over ranks, -1 where there was none."""

    # torchmetrics.MaxMetric computes in float32, which rounds bytes above 16 MiB.
    full_state_update = False
    values: Tensor

    def __init__(self, num_values: int) -> None:
        super().__init__()
        self.add_state("values", default=torch.full((num_values,), -1), dist_reduce_fx="max")

    @override
    def update(self, values: Tensor) -> None:
        self.values = torch.maximum(self.values, values.to(self.values))

    @override
    def compute(self) -> Tensor:
        return self.values
