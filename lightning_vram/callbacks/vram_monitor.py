"""Measure where the memory of a run goes, while it runs.

On an accelerator the allocator is asked, at next to no cost. On the host there is no allocator to ask: there, and
where ``track=True`` wants to know what the bytes are for, a dispatch mode follows every tensor of the measured
batches (:mod:`lightning_vram.memory.tracker`): some 10-20 microseconds per operator of a measured batch, nothing in
the others. A step of many small kernels can take twice as long while it is tracked.
"""

import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_vram.callbacks.max_over_ranks import MaxOverRanks
from lightning_vram.callbacks.progress_bar import ProgressBarItem
from lightning_vram.memory.allocator import has_cache
from lightning_vram.memory.checks import check_bool, check_positive_int
from lightning_vram.memory.compiled import is_compiled
from lightning_vram.memory.measurement import Measurement, largest, write_measurement
from lightning_vram.memory.out_of_memory import read_out_of_memory
from lightning_vram.memory.phase_peaks import PhasePeaks
from lightning_vram.memory.probe import MemoryProbe
from lightning_vram.memory.timeline import Phase
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
        metric: Reduces over the ranks.
        last: The last reading.
        file: Where readings are written.
        bar_item: What is shown in the progress bar.
        previous_end: When the last training batch ended.
    """

    stage: str = "train"
    allocator_peaks: dict[str, PhasePeaks] = field(default_factory=dict)
    probe: MemoryProbe | None = None
    metric: MaxOverRanks | None = None
    last: Measurement | None = None
    file: Path | None = None
    bar_item: ProgressBarItem | None = None
    previous_end: float | None = None


class VRAMMonitor(Callback):
    """Log, show and record peak and current memory, per phase and, where tracked, per category.

    Measured are the first two batches of each epoch and every n-th, in all stages; numbers are the maximum over the
    ranks. They go to every logger as ``vram/peak_allocated_bytes``, ``vram/backward/peak_allocated_bytes`` and so on
    (stages other than training under ``vram/validate/...``), to the progress bar as ``vram``, and line by line to a
    file that ``lightning-vram report`` reads. On an accelerator the peak since the last reading counts every batch in
    between. An out-of-memory error gets a note with the last reading. Training is not changed, and nothing is stored
    in checkpoints. Under DDP and FSDP all ranks reduce at the same batch: it depends on the batch index alone.

    Args:
        every_n_batches: Measure every n-th batch. ``None`` takes the trainer's ``log_every_n_steps``.
        track: Follow tensors in the measured batches, which tells what the bytes are for and slows these batches: see
            the module's docstring for the price. ``None`` tracks where there is no allocator to ask, which is on the
            host; ``False`` never does. Compiled modules are not tracked: they would run uncompiled.
        path: JSON Lines file to append to; a relative one lies in ``trainer.log_dir``. ``None`` writes none.

    Raises:
        TypeError: If an argument has another type than said above.
        ValueError: If ``every_n_batches`` is smaller than 1.

    Attributes:
        peaks: For each stage so far the measurement with the highest peak.

    Example:
        >>> import lightning.pytorch as pl
        >>> from lightning_vram import VRAMMonitor
        >>> trainer = pl.Trainer(callbacks=[VRAMMonitor(every_n_batches=100)], logger=False)
    """

    def __init__(
        self, every_n_batches: int | None = None, *, track: bool | None = None, path: str | Path | None = "vram.jsonl"
    ) -> None:
        if every_n_batches is not None:
            check_positive_int("VRAMMonitor(every_n_batches)", every_n_batches)
        if track is not None:
            check_bool("VRAMMonitor(track)", track)
        if path is not None and not isinstance(path, str | Path):
            raise TypeError(f"VRAMMonitor(path) must be text or a Path, got {path!r} of type {type(path).__name__}.")
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
        if stage == "fit":
            self.peaks = {}
            self._seconds.clear()
        folder = trainer.log_dir  # on all ranks: it is broadcast
        self._run.file = Path(folder or ".") / self.path if self.path is not None else None
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
        if read_out_of_memory(exception) is not None and self._run.last is not None:
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
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._abort()
        device = trainer.strategy.root_device
        if has_cache(device):  # the batches since the last reading
            self._run.probe = MemoryProbe(device, self._peaks_of("train", device), track=False)
            self._end(trainer, trainer.fit_loop.epoch_loop.batch_idx)

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
        self._switch_stage("train", trainer)

    @override
    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._switch_stage("test", trainer)

    on_test_batch_start = on_validation_batch_start
    on_test_batch_end = on_validation_batch_end

    @override
    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._switch_stage("predict", trainer)

    on_predict_batch_start = on_validation_batch_start
    on_predict_batch_end = on_validation_batch_end

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_run": _Run()}  # a copy starts between runs

    def _switch_stage(self, stage: str, trainer: pl.Trainer) -> None:
        self._abort()  # a batch whose end was skipped
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

    def _begin(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        every_n_batches = self.every_n_batches or trainer.log_every_n_steps or 1  # type: ignore[attr-defined]
        if trainer.sanity_checking or not (batch_idx < _NUM_FIRST_BATCHES or (batch_idx + 1) % every_n_batches == 0):
            return
        device = trainer.strategy.root_device
        is_counted = has_cache(device)
        track = (not is_counted if self.track is None else self.track) and not is_compiled(pl_module)
        self._abort()
        self._run.probe = MemoryProbe(
            device, self._peaks_of(self._run.stage, device) if is_counted else None, track=track
        )
        self._run.probe.start(pl_module, trainer.optimizers, batch)

    def _end(self, trainer: pl.Trainer, batch_idx: int) -> None:
        if self._run.probe is None:
            return
        probe, self._run.probe = self._run.probe, None
        measurement = probe.finish(self._run.stage, trainer.current_epoch, batch_idx, trainer.global_step)
        self._run.allocator_peaks.pop(self._run.stage, None)
        if measurement is not None:
            self._publish(trainer, self._reduce(trainer, measurement))

    def _abort(self) -> None:
        if self._run.probe is not None:
            self._run.probe.abort()
            self._run.probe = None

    def _reduce(self, trainer: pl.Trainer, measurement: Measurement) -> Measurement:
        """Take each size's maximum over the ranks."""
        sizes = measurement.sizes()
        if self._run.metric is None or len(self._run.metric.values) != len(sizes):
            self._run.metric = MaxOverRanks(len(sizes)).to(trainer.strategy.root_device)
        self._run.metric.reset()
        self._run.metric.update(torch.tensor(list(sizes.values()), dtype=torch.int64))
        maxima: list[int] = self._run.metric.compute().tolist()
        return measurement.with_sizes(dict(zip(sizes, maxima, strict=True)), seconds_per_batch=self.seconds_per_batch)

    def _show(self) -> str | None:
        return None if self._run.last is None else format_bytes(self._run.last.peak_allocated_bytes)

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
