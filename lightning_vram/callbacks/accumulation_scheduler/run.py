"""Gradient accumulation in one fit, from its setup to its end."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.optim import Optimizer

from lightning_vram.callbacks.accumulation_scheduler.mean import (
    AccumulationMean,
    AccumulationWeights,
    AccumulationWindow,
)
from lightning_vram.core.batches.micro_batches import NormMomentum, find_batch_norms
from lightning_vram.core.patching import MethodPatch
from lightning_vram.private_names.lightning import (
    MAKE_ZERO_GRAD,
    RUN,
    WINDOW_ENDS,
    epoch_ends,
    skips_backward,
    training_data,
)
from lightning_vram.techniques.accumulation_schedule import AccumulationSchedule


class SteppingBatches:
    """Changes the class of a trainer to one of the same name with another estimate, until :meth:`remove`.

    Learning rate schedules are made from the estimate, in ``configure_optimizers``. Lightning uses the factor of that
    moment: it estimates 16 where a schedule makes 10 steps. It is a property, which only a class can replace. A copy
    of the trainer, such as the one of a spawned worker process, has its original class.

    ``end`` is called when another run begins: the error of another callback can keep a run from being cleaned up.
    """

    def __init__(
        self, trainer: pl.Trainer, read_schedule: Callable[[], AccumulationSchedule], end: Callable[[], None]
    ) -> None:
        original = type(trainer)
        self._trainer = trainer
        self._original = original
        self._read_schedule: Callable[[], AccumulationSchedule] | None = read_schedule

        def estimate(trainer: Any) -> int | float:
            lightning_estimate: int | float = original.estimated_stepping_batches.__get__(trainer)  # sets up the data
            is_endless = trainer.max_epochs == -1 or trainer.num_training_batches == float("inf")
            if self._read_schedule is None or is_endless:
                return lightning_estimate
            steps = self._read_schedule().count_steps(trainer.num_training_batches, max(trainer.max_epochs, 1))
            return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)

        def run(trainer: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self._read_schedule is not None:
                end()
            return getattr(original, RUN)(trainer, *args, **kwargs)

        def reduce(trainer: Any, protocol: Any) -> Any:
            reduced: Any = original.__reduce_ex__(trainer, protocol)
            function, arguments, *others = reduced
            arguments = (original if one is self._swapped else one for one in arguments)
            return operator.call, (function, *arguments), *others  # pickle looks at the class if it knows the function

        attributes = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
        changed = {"estimated_stepping_batches": property(estimate), RUN: run, "__reduce_ex__": reduce}
        self._swapped = type(original.__name__, (original,), attributes | changed)
        trainer.__class__ = self._swapped

    def remove(self) -> None:
        """Put the class back. Calling it again does nothing."""
        self._read_schedule = None  # if another class was put over this one, it stays and passes calls on
        if type(self._trainer) is self._swapped:
            self._trainer.__class__ = self._original


_MAX_NAMES = 5


class AccumulationRun:
    """Replaces methods of a trainer's loops, until :meth:`end`.

    Lightning decides by the batch index modulo ``trainer.accumulate_grad_batches``: where the factor changes, the
    gradients of a window that has not stepped would stay in the next one. Meanwhile that attribute is the length of the
    current window: Lightning divides by it. Without a ``schedule``, the factor follows from the training data, by
    ``plan_factor``.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        window: AccumulationWindow,  # a checkpoint may still be loaded into it
        schedule: AccumulationSchedule | None,
        plan_factor: Callable[[pl.Trainer], int],
    ) -> None:
        self._trainer = trainer
        self._window = window
        self._given = self._schedule = schedule
        self._plan_factor = plan_factor
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._optimization = self._epoch_loop.automatic_optimization
        self._loader: object = None  # that the schedule was read from
        self._factor: int | None = None
        self._factor_before = trainer.accumulate_grad_batches
        self.is_over = False  # whether it has ended
        self._stepping_batches = SteppingBatches(trainer, self.read_schedule, self.end)
        self._patches = [MethodPatch(trainer.fit_loop, "setup_data", partial(partial, self._set_up_data))]
        if schedule is not None:
            self._set_factor()
        self._mean: AccumulationMean | None = None
        self._norms: NormMomentum | None = None

    @property
    def is_interrupted(self) -> bool:
        """Whether a checkpoint made now will run the current micro-batch again."""
        has_begun = self._mean is not None and self._epoch_loop.batch_progress.total.ready == self._window.batch
        return has_begun and not self._is_processed

    @property
    def _is_processed(self) -> bool:
        progress: Any = self._epoch_loop.batch_progress.current
        return bool(progress.processed >= progress.ready)

    @property
    def _begins_window(self) -> bool:
        # The first batch of an epoch also drops what an epoch that was cut short left, or a trial of a tuner.
        return self._window.is_full or self._epoch_loop.batch_progress.current.ready == 1

    def read_schedule(self) -> AccumulationSchedule:
        """Return the schedule; one that follows from the data is read again when the loader changes."""
        loader = training_data(self._trainer.fit_loop)
        if self._schedule is None or self._loader not in (None, loader):
            self._schedule = AccumulationSchedule("epoch", (0,), (self._plan_factor(self._trainer),))
            self._loader = loader
        return self._schedule

    def start(self, weights: AccumulationWeights | None) -> None:
        """Take over the loops: tuners train before any other hook."""
        self._mean = AccumulationMean(self._trainer, self._window, weights)
        self._patches += [
            MethodPatch(self._epoch_loop, WINDOW_ENDS, partial(partial, self._ends_window)),
            MethodPatch(self._optimization, "run", partial(partial, self._run_batch)),
            MethodPatch(self._optimization, MAKE_ZERO_GRAD, partial(partial, self._make_zero_grad)),
        ]

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
        for patch in reversed(self._patches):
            patch.remove()
        if self._mean is not None:
            self._mean.remove()
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
        """Return the length of a window that begins now."""
        trainer = self._trainer
        factor = self.read_schedule().factor(trainer.current_epoch, trainer.global_step)
        if factor != self._factor:
            self._factor = factor
            for logger in trainer.loggers:
                logger.log_metrics({"vram/accumulate_grad_batches": float(factor)}, step=trainer.global_step)
        num_left = trainer.num_training_batches - self._epoch_loop.batch_idx  # with the current one
        return int(max(1, min(factor, num_left)))

    def _open(self) -> None:
        if self._begins_window:
            self._window.open(self._plan())

    def _close_with_epoch(self) -> None:
        if epoch_ends(self._epoch_loop):
            self._window.position = self._window.length  # Lightning steps then; a stream does not announce it

    def _ends_window(self, inner: Callable[[], Any]) -> bool:
        window = self._window
        # Nothing is accumulated in the epoch that StochasticWeightAveraging adds for batch norm statistics; and the
        # batch that a checkpoint of a run without this callback ended with is unknown.
        if skips_backward(self._optimization) or (window.batch is None and self._epoch_loop.restarting):
            return bool(inner())
        progress = self._epoch_loop.batch_progress
        if progress.total.ready == window.batch:
            return window.is_full
        if not self._is_processed:  # it has not begun: another hook asks in on_train_batch_start
            return (self._plan() if self._begins_window else window.length - window.position) == 1
        self._open()
        window.pass_over(progress.total.ready)  # it is None, or on_train_batch_start returned -1
        self._close_with_epoch()
        assert self._mean is not None
        self._mean.pass_over()
        return window.is_full

    def _run_batch(
        self, inner: Callable[..., Any], optimizer: Optimizer, batch_idx: int, kwargs: dict[str, Any]
    ) -> Any:
        if skips_backward(self._optimization):
            return inner(optimizer, batch_idx, kwargs)
        self._open()
        self._window.begin(self._epoch_loop.batch_progress.total.ready)
        self._trainer.accumulate_grad_batches = self._window.length
        assert self._mean is not None
        self._mean.begin(kwargs["batch"])
        if self._norms is not None:
            self._norms.scale(1 / self._window.length)
        try:
            result = inner(optimizer, batch_idx, kwargs)
        finally:
            if self._norms is not None:  # copies, checkpoints and other callbacks see the momentum they know
                self._norms.restore()
        self._close_with_epoch()
        return result

    def _make_zero_grad(self, inner: Callable[..., Any], batch_idx: int, optimizer: Optimizer) -> Any:
        if skips_backward(self._optimization):
            return inner(batch_idx, optimizer)
        if not self._window.is_first:
            return None
        length = self._trainer.accumulate_grad_batches
        self._trainer.accumulate_grad_batches = 1  # of which any batch index is a multiple
        try:
            return inner(batch_idx, optimizer)
        finally:
            self._trainer.accumulate_grad_batches = length
