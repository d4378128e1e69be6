"""Gradient accumulation in one fit, from its setup to its end."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_vram.callbacks.accumulation_scheduler.loop import AccumulationLoop
from lightning_vram.callbacks.accumulation_scheduler.mean import AccumulationMean
from lightning_vram.callbacks.accumulation_scheduler.stepping_batches import SteppingBatches
from lightning_vram.callbacks.accumulation_scheduler.weights import AccumulationWeights
from lightning_vram.callbacks.accumulation_scheduler.window import AccumulationWindow
from lightning_vram.core.batches.norm_momentum import NormMomentum, find_batch_norms
from lightning_vram.core.surgery.shadow import Shadow
from lightning_vram.private_names.lightning.loops import training_data
from lightning_vram.techniques.accumulation_schedule import AccumulationSchedule

_MAX_NAMES = 5


class AccumulationRun:
    """Changes a trainer until :meth:`end`.

    Without a ``schedule``, the factor follows from the training data, by ``plan_factor``.
    """

    def __init__(
        self, trainer: pl.Trainer, schedule: AccumulationSchedule | None, plan_factor: Callable[[pl.Trainer], int]
    ) -> None:
        self._trainer = trainer
        self._given = self._schedule = schedule
        self._plan_factor = plan_factor
        self._loader: object = None  # that the schedule was read from
        self._factor: int | None = None
        self._factor_before = trainer.accumulate_grad_batches
        self.is_over = False  # whether it has ended
        self._stepping_batches = SteppingBatches(trainer, self.read_schedule, self.end)
        self._setup_data = Shadow(trainer.fit_loop, "setup_data", partial(partial, self._set_up_data))
        if schedule is not None:
            self._set_factor()
        self._window: AccumulationWindow | None = None
        self._loop: AccumulationLoop | None = None
        self._mean: AccumulationMean | None = None
        self._norms: NormMomentum | None = None

    @property
    def is_interrupted(self) -> bool:
        """Whether a checkpoint made now will run the current micro-batch again."""
        return self._loop is not None and self._loop.is_interrupted

    def read_schedule(self) -> AccumulationSchedule:
        """Return the schedule; one that follows from the data is read again when the loader changes."""
        loader = training_data(self._trainer.fit_loop)
        if self._schedule is None or self._loader not in (None, loader):
            self._schedule = AccumulationSchedule("epoch", (0,), (self._plan_factor(self._trainer),))
            self._loader = loader
        return self._schedule

    def start(self, window: AccumulationWindow, weights: AccumulationWeights | None) -> None:
        """Take over the loops: tuners train before any other hook. A checkpoint may still be loaded into ``window``."""
        self._window = window
        self._mean = AccumulationMean(self._trainer, window, weights)
        self._loop = AccumulationLoop(self._trainer, window, self._plan, self._around, self._mean.pass_over)

    def begin_training(self) -> AccumulationSchedule:
        """Forget what tuners made of the data, which is set up now; return the schedule of the training."""
        self._factor, self._schedule, self._loader = None, self._given, None
        return self.read_schedule()

    def correct_batch_norms(self, *, is_asked: bool) -> None:
        """Move running statistics once per window, if asked; warn of layers that differ from one big batch."""
        if is_asked:
            self._norms = NormMomentum(self._trainer.lightning_module)
        names = find_batch_norms(self._trainer.lightning_module)
        if not names:
            return
        listed = ", ".join(names[:_MAX_NAMES])
        if len(names) > _MAX_NAMES:
            listed += f" and {len(names) - _MAX_NAMES} more"
        statistics = "corrected" if self._norms is not None else "not corrected (correct_batch_norm=False)"
        rank_zero_warn(
            f"AccumulationScheduler: batch norm normalizes each micro-batch separately in {listed}. Running "
            f"statistics are {statistics}. Larger micro-batches, GroupNorm or frozen batch norm avoid this."
        )

    def end(self) -> None:
        """Put everything back. Calling it again does nothing."""
        if self._loop is not None:
            self._loop.remove()
        if self._mean is not None:
            self._mean.remove()
        self._setup_data.remove()
        self._stepping_batches.remove()
        if not self.is_over:
            self._trainer.accumulate_grad_batches = self._factor_before
        self.is_over = True

    def _set_up_data(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        if training_data(self._trainer.fit_loop) is not None:
            self._set_factor()
        return result

    def _set_factor(self) -> None:
        """Set the factor that ``configure_optimizers`` and tuners read before the first window."""
        trainer = self._trainer
        trainer.accumulate_grad_batches = self.read_schedule().factor(trainer.current_epoch, trainer.global_step)

    def _plan(self) -> int:
        assert self._loop is not None
        trainer = self._trainer
        factor = self.read_schedule().factor(trainer.current_epoch, trainer.global_step)
        if factor != self._factor:
            self._factor = factor
            for logger in trainer.loggers:
                logger.log_metrics({"vram/accumulate_grad_batches": float(factor)}, step=trainer.global_step)
        return int(max(1, min(factor, self._loop.num_batches_left)))

    @contextmanager
    def _around(self, batch: Any) -> Iterator[None]:
        assert self._mean is not None
        assert self._window is not None
        self._mean.begin(batch)
        # Only while a micro-batch runs, so that copies, checkpoints and other callbacks see the momentum they know.
        if self._norms is None:
            yield
            return
        self._norms.scale(1 / self._window.length)
        try:
            yield
        finally:
            self._norms.restore()
