"""Make Lightning's training loop step and zero by our accumulation windows."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_vram.callbacks.accumulation_scheduler.window import AccumulationWindow
from lightning_vram.core.surgery.shadow import Shadow
from lightning_vram.private_names.lightning.loops import MAKE_ZERO_GRAD, WINDOW_ENDS, epoch_ends, skips_backward


class AccumulationLoop:
    """Replaces three methods of a trainer's loops, until :meth:`remove`.

    Lightning decides by the batch index modulo ``trainer.accumulate_grad_batches``: where the factor changes, the
    gradients of a window that has not stepped would stay in the next one. Until removed, that attribute is the length
    of the current window: Lightning divides by it. ``plan`` returns the length of a window that begins now.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        window: AccumulationWindow,
        plan: Callable[[], int],
        around: Callable[[Any], AbstractContextManager[object]],  # entered for each batch that the window has begun
        pass_over: Callable[[], None],  # called for each batch that is missing
    ) -> None:
        self._trainer = trainer
        self._window = window
        self._plan = plan
        self._around = around
        self._pass_over = pass_over
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._optimization = self._epoch_loop.automatic_optimization
        self._patches = [
            Shadow(self._epoch_loop, WINDOW_ENDS, partial(partial, self._ends_window)),
            Shadow(self._optimization, "run", partial(partial, self._run)),
            Shadow(self._optimization, MAKE_ZERO_GRAD, partial(partial, self._make_zero_grad)),
        ]

    @property
    def is_interrupted(self) -> bool:
        """Whether a checkpoint made now will run the current micro-batch again."""
        return self._epoch_loop.batch_progress.total.ready == self._window.batch and not self._is_processed

    @property
    def num_batches_left(self) -> int | float:
        """Batches left in this epoch, with the current one."""
        return self._trainer.num_training_batches - self._epoch_loop.batch_idx

    def remove(self) -> None:
        """Put everything back. Calling it again does nothing."""
        for patch in reversed(self._patches):
            patch.remove()

    @property
    def _is_processed(self) -> bool:
        progress: Any = self._epoch_loop.batch_progress.current
        return bool(progress.processed >= progress.ready)

    @property
    def _begins_window(self) -> bool:
        # The first batch of an epoch also drops what an epoch that was cut short left, or a trial of a tuner.
        return self._window.is_full or self._epoch_loop.batch_progress.current.ready == 1

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
        self._pass_over()
        return window.is_full

    def _run(self, inner: Callable[..., Any], optimizer: Optimizer, batch_idx: int, kwargs: dict[str, Any]) -> Any:
        if skips_backward(self._optimization):
            return inner(optimizer, batch_idx, kwargs)
        self._open()
        self._window.begin(self._epoch_loop.batch_progress.total.ready)
        self._trainer.accumulate_grad_batches = self._window.length
        with self._around(kwargs["batch"]):
            result = inner(optimizer, batch_idx, kwargs)
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
