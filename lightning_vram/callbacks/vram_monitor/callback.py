"""Measure where the memory of a run goes, while it runs.

On an accelerator the allocator is asked, at next to no cost. On the host there is no allocator to ask: there, and
where ``track=True`` wants to know what the bytes are for, a dispatch mode follows every tensor of the measured
batches (``memory/tracking/tracker.py``): some 10-20 microseconds per operator of a measured batch, nothing in the
others. A step of many small kernels can take twice as long while it is tracked.
"""

import statistics
import time
from collections import deque
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.argument_checks import check_bool, check_positive_int
from lightning_vram.callbacks.hook_points import check_trainer
from lightning_vram.callbacks.vram_monitor.max_over_ranks import MaxOverRanks
from lightning_vram.callbacks.vram_monitor.progress_bar import ProgressBarItem
from lightning_vram.core.surgery.compiled import is_compiled
from lightning_vram.memory.device.allocator import has_cache
from lightning_vram.memory.device.measurement import SIZE_NAMES, Measurement, largest, write_measurement
from lightning_vram.memory.device.out_of_memory import read_out_of_memory
from lightning_vram.memory.device.phase_peaks import PhasePeaks
from lightning_vram.memory.device.probe import MemoryProbe
from lightning_vram.memory.tracking.timeline import Phase
from lightning_vram.memory.units import format_bytes

_NUM_FIRST_BATCHES = 2  # the first shows at once what a step takes, the second holds the optimizer's state as well
_NUM_TIMED_BATCHES = 1000


@dataclass
class _Run:
    """What is known from setup to teardown.

    Args:
        stage: Running stage.
        allocator_peaks: Peaks since the last reading, for each stage.
        probe: The reading under way.
        batch_idx: Of the batch it reads.
        metric: Reduces over the ranks.
        largest: The reading with the highest peak of a stage other than training, until the stage ends.
        last: The last reading, of all ranks.
        file: Where readings are written.
        bar_item: What is shown in the progress bar.
        previous_end: When the last training batch ended.
    """

    stage: str = "train"
    allocator_peaks: dict[str, PhasePeaks] = field(default_factory=dict)
    probe: MemoryProbe | None = None
    batch_idx: int = 0
    metric: MaxOverRanks | None = None
    largest: Measurement | None = None
    last: Measurement | None = None
    file: Path | None = None
    bar_item: ProgressBarItem | None = None
    previous_end: float | None = None


class VRAMMonitor(Callback):
    """Log, show and record peak and current memory, per phase and, where tracked, per category.

    Measured are the first two batches of each epoch and every n-th, in all stages; numbers are the maximum over the
    ranks. They go to every logger as ``vram/peak_allocated_bytes``, ``vram/backward/peak_allocated_bytes`` and so on,
    to the progress bar as ``vram`` (the highest peak so far), and line by line to a file that
    ``lightning-vram report`` reads: in training each reading; in validation, test and prediction the one with the
    highest peak, at the end (``vram/validate/...``). On an accelerator the batches between readings count for the
    peak, too. An out-of-memory error gets a note with the last reading. Training is not changed, and nothing is
    stored in checkpoints. Under DDP and FSDP all ranks reduce at the same training batch, which depends on the batch
    index alone, and at the end of the other stages, where they may have different numbers of batches.

    Args:
        every_n_batches: Measure every n-th batch. ``None`` takes the trainer's ``log_every_n_steps`` (0: the first two
            only).
        track: Follow tensors in the measured batches, which tells what the bytes are for and slows these batches: see
            the module's docstring for the price. Gradients of ``prod`` and ``cumprod`` are then equal up to rounding in
            those batches: PyTorch picks other formulas under any dispatch mode. ``None`` tracks where there is no
            allocator to ask, which is on the host; ``False`` never does. Compiled modules are not tracked: they would
            run uncompiled.
        path: JSON Lines file to append to; a relative one lies in ``trainer.log_dir``. ``None`` writes none, and so
            does ``fast_dev_run``.

    Raises:
        TypeError: If an argument has another type than said above.
        ValueError: If ``every_n_batches`` is smaller than 1, or ``path`` names no file.
        MisconfigurationException: In ``setup``, if there are several in one trainer.

    Attributes:
        peaks: For each stage so far the measurement with the highest peak.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import VRAMMonitor
        >>> trainer = pl.Trainer(callbacks=[VRAMMonitor(every_n_batches=100)], logger=False)
    """

    hears_micro_batches = True  # phases change in each of them: see MicroBatching
    uses_gradients = False  # in its hooks, so that optimizers may step before: see FSDPOffloadStrategy

    def __init__(
        self, every_n_batches: int | None = None, *, track: bool | None = None, path: str | Path | None = "vram.jsonl"
    ) -> None:
        if every_n_batches is not None:
            check_positive_int("VRAMMonitor(every_n_batches)", every_n_batches)
        if track is not None:
            check_bool("VRAMMonitor(track)", track)
        if path is not None and not isinstance(path, str | Path):
            raise TypeError(f"VRAMMonitor(path) must be text or a Path, got {path!r} of type {type(path).__name__}.")
        if path is not None and not Path(path).name:  # "" and "." are folders
            raise ValueError(f"VRAMMonitor(path) must name a file, got {str(path)!r}. path=None writes none.")
        self.every_n_batches = every_n_batches
        self.track = track
        self.path = path
        self.peaks: dict[str, Measurement] = {}
        self._seconds: deque[float] = deque(maxlen=_NUM_TIMED_BATCHES)
        self._run = _Run()

    @property
    def seconds_per_batch(self) -> float | None:
        """Median time between the ends of training batches, tracked ones left out; ``None`` before there is any."""
        return statistics.median(self._seconds) if self._seconds else None

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_trainer("VRAMMonitor", trainer)
        if sum(isinstance(callback, VRAMMonitor) for callback in trainer.callbacks) > 1:  # type: ignore[attr-defined]
            raise MisconfigurationException("VRAMMonitor can be used once, got several: they measure one another.")
        if stage == "fit":
            self.peaks = {}
            self._seconds.clear()
        folder = trainer.log_dir  # on all ranks: it is broadcast
        if self.path is not None and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self._run.file = Path(folder or ".") / self.path
        self._run.bar_item = ProgressBarItem("vram", self._show)
        self._run.bar_item.attach(trainer)
        if self.track and is_compiled(pl_module):
            rank_zero_warn(
                "VRAMMonitor(track=True) has no effect on a compiled module: tracking would run it uncompiled."
            )

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._abort()
        if self._run.bar_item is not None:
            self._run.bar_item.detach()
        self._run = _Run()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if read_out_of_memory(exception) is not None:
            if (measurement := self._read_failed_batch(trainer)) is not None:
                exception.add_note(f"VRAMMonitor, in the batch that ran out of memory: {_describe(measurement)}")
            if self._run.last is not None:
                exception.add_note(f"VRAMMonitor, last reading before memory ran out: {_describe(self._run.last)}")
        self.teardown(trainer, pl_module, "fit")

    @override
    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._switch_stage("train", trainer)

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._begin(trainer, pl_module, batch, batch_idx)

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._switch_phase(Phase.BACKWARD)

    @override
    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._switch_phase(Phase.FORWARD)

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._switch_phase(Phase.OPTIMIZER_STEP)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: STEP_OUTPUT, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        if self._run.previous_end is not None and not (self._run.probe is not None and self._run.probe.is_tracking):
            self._seconds.append(now - self._run.previous_end)
        self._end(trainer, batch_idx)
        self._run.previous_end = time.perf_counter()

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._abort()  # a batch that was skipped after it began

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        flushed = self._flush(trainer)  # the batches since the last reading
        if flushed is not None:
            self._publish(trainer, self._reduce(trainer, flushed))

    @override
    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._switch_stage("validate", trainer)

    @override
    def on_validation_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._begin(trainer, pl_module, batch, batch_idx)

    @override
    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: STEP_OUTPUT,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._end(trainer, batch_idx)

    @override
    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end_stage(trainer)
        self._switch_stage("train", trainer)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._switch_stage("test", trainer)

    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end
    on_test_end = on_validation_end

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._switch_stage("predict", trainer)

    on_predict_batch_start = on_validation_batch_start
    on_predict_batch_end = on_validation_batch_end
    on_predict_end = on_validation_end

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_run": _Run()}  # a copy starts between runs

    def _switch_stage(self, stage: str, trainer: pl.Trainer) -> None:
        self._abort()
        device = trainer.strategy.root_device
        if has_cache(device):
            self._peaks_of(self._run.stage, device).read()
        self._run.stage = stage
        self._run.previous_end = None  # what lies between batches of different stages is no batch

    def _peaks_of(self, stage: str, device: torch.device) -> PhasePeaks:
        return self._run.allocator_peaks.setdefault(stage, PhasePeaks(device))

    def _switch_phase(self, phase: Phase) -> None:
        if self._run.probe is not None:
            self._run.probe.switch(phase)

    def _tracks(self, trainer: pl.Trainer) -> bool:
        wanted = not has_cache(trainer.strategy.root_device) if self.track is None else self.track
        return wanted and not is_compiled(trainer.lightning_module)

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        every_n_batches = self.every_n_batches or trainer.log_every_n_steps  # type: ignore[attr-defined]
        is_nth = every_n_batches > 0 and (batch_idx + 1) % every_n_batches == 0
        if trainer.sanity_checking or not (is_nth or batch_idx < _NUM_FIRST_BATCHES):
            return
        self._abort()
        self._run.batch_idx = batch_idx
        device = trainer.strategy.root_device
        peaks = self._peaks_of(self._run.stage, device) if has_cache(device) else None
        self._run.probe = MemoryProbe(device, peaks, track=self._tracks(trainer))
        self._run.probe.start(pl_module, trainer.optimizers, batch)

    def _end(self, trainer: pl.Trainer, batch_idx: int) -> None:
        if self._run.probe is None:
            return
        probe, self._run.probe = self._run.probe, None
        measurement = probe.finish(self._run.stage, trainer.current_epoch, batch_idx, trainer.global_step)
        self._run.allocator_peaks.pop(self._run.stage, None)
        if measurement is None:
            return
        if self._run.stage == "train":
            self._publish(trainer, self._reduce(trainer, measurement))
        else:
            self._keep_largest(measurement)

    def _end_stage(self, trainer: pl.Trainer) -> None:
        """Reduce and publish once: ranks may have seen different numbers of batches, even none."""
        flushed = self._flush(trainer)
        if flushed is not None:
            self._keep_largest(flushed)
        found, self._run.largest = self._run.largest, None
        device = trainer.strategy.root_device
        if trainer.sanity_checking or not (has_cache(device) or self._tracks(trainer)):
            return
        nothing = Measurement(
            self._run.stage, trainer.current_epoch, 0, trainer.global_step, str(device), "tracker", -1, -1
        )
        measurement = self._reduce(trainer, found or nothing)
        if measurement.peak_allocated_bytes >= 0:
            self._publish(trainer, measurement)

    def _flush(self, trainer: pl.Trainer) -> Measurement | None:
        """Read the allocator's peaks since the last reading."""
        self._abort()
        device = trainer.strategy.root_device
        if not has_cache(device):
            return None
        probe = MemoryProbe(device, self._peaks_of(self._run.stage, device), track=False)
        batch_idx = max(0, trainer.fit_loop.epoch_loop.batch_idx) if self._run.stage == "train" else 0
        epoch = self._run.last.epoch if self._run.last is not None else trainer.current_epoch
        measurement = probe.finish(self._run.stage, epoch, batch_idx, trainer.global_step)
        self._run.allocator_peaks.pop(self._run.stage, None)
        return measurement

    def _keep_largest(self, measurement: Measurement) -> None:
        known = self._run.largest
        self._run.largest = measurement if known is None else largest([known, measurement])

    def _read_failed_batch(self, trainer: pl.Trainer) -> Measurement | None:
        """End the reading under way, if there is one, without the other ranks: they may not be there."""
        if self._run.probe is None:
            return None
        probe, self._run.probe = self._run.probe, None
        return probe.finish(self._run.stage, trainer.current_epoch, self._run.batch_idx, trainer.global_step)

    def _abort(self) -> None:
        if self._run.probe is not None:
            self._run.probe.abort()
            self._run.probe = None

    def _reduce(self, trainer: pl.Trainer, measurement: Measurement) -> Measurement:
        """Take each size's maximum over the ranks."""
        if self._run.metric is None:
            self._run.metric = MaxOverRanks(len(SIZE_NAMES)).to(trainer.strategy.root_device)
        sizes = measurement.sizes()
        self._run.metric.reset()
        self._run.metric.update(torch.tensor([sizes.get(name, -1) for name in SIZE_NAMES]))
        maxima: list[int] = self._run.metric.compute().tolist()
        known = {name: size for name, size in zip(SIZE_NAMES, maxima, strict=True) if size >= 0}
        measurement = measurement.with_sizes({"allocated_bytes": -1, "peak_allocated_bytes": -1, **known})
        return replace(measurement, seconds_per_batch=self.seconds_per_batch)

    def _show(self) -> str | None:
        return format_bytes(largest(self.peaks.values()).peak_allocated_bytes) if self.peaks else None

    def _publish(self, trainer: pl.Trainer, measurement: Measurement) -> None:
        self._run.last = measurement
        stage = measurement.stage
        self.peaks[stage] = largest([self.peaks[stage], measurement]) if stage in self.peaks else measurement
        prefix = "vram" if stage == "train" else f"vram/{stage}"
        for logger in trainer.loggers:
            logger.log_metrics(
                {f"{prefix}/{name}": float(size) for name, size in measurement.sizes().items()}, step=measurement.step
            )
        if self._run.file is not None and trainer.is_global_zero:
            write_measurement(self._run.file, measurement)


def _describe(measurement: Measurement) -> str:
    parts = [f"peak {format_bytes(measurement.peak_allocated_bytes)} on {measurement.device}"]
    parts += [f"{phase} {format_bytes(peak)}" for phase, peak in measurement.peak_by_phase.items()]
    parts += [f"{kind} {format_bytes(size)}" for kind, size in measurement.peak_by_category.items() if size]
    return f"{measurement.stage} epoch {measurement.epoch} batch {measurement.batch_idx}: {', '.join(parts)}."
