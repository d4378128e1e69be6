"""Make Lightning's training loop go by windows of our own: when to step and when to zero.

Lightning decides both by the batch index modulo ``trainer.accumulate_grad_batches``: where the factor changes, the
gradients of a window that has not stepped stay in the next one.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_vram.callbacks.accumulation_window import AccumulationWindow
from lightning_vram.callbacks.shadow import Shadow

Method = Callable[..., Any]


class AccumulationLoop:
    """Stands in for three methods of a trainer's loops, until :meth:`remove`.

    ``trainer.accumulate_grad_batches`` is the length of the window under way meanwhile: Lightning divides by it.

    Args:
        trainer: Whose optimizers are set up.
        window: Where the run stands.
        plan: Returns the length of a window that begins now.
        around: Entered for each micro-batch, when the window has begun it; gets the batch.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        window: AccumulationWindow,
        plan: Callable[[], int],
        around: Callable[[Any], AbstractContextManager[object]],
    ) -> None:
        self._trainer = trainer
        self._window = window
        self._plan = plan
        self._around = around
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._optimization = self._epoch_loop.automatic_optimization
        self._shadows = [
            Shadow(self._epoch_loop, "_accumulated_batches_reached", self._make_reached),
            Shadow(self._optimization, "run", self._make_run),
            Shadow(self._optimization, "_make_zero_grad_fn", self._make_make_zero_grad),
        ]

    @property
    def is_interrupted(self) -> bool:
        """Whether a checkpoint made now will run the micro-batch under way again."""
        return self._epoch_loop.batch_progress.total.ready == self._window.batch and not self._is_processed

    @property
    def num_batches_left(self) -> int | float:
        """In this epoch, with the one under way."""
        return self._trainer.num_training_batches - self._epoch_loop.batch_idx

    def remove(self) -> None:
        """Put everything back. Calling it again does nothing."""
        for shadow in reversed(self._shadows):
            shadow.remove()

    @property
    def _is_processed(self) -> bool:
        progress: Any = self._epoch_loop.batch_progress.current
        return bool(progress.processed >= progress.ready)

    def _make_reached(self, inner: Method) -> Method:
        def reached() -> bool:
            window = self._window
            # Nothing is accumulated in the epoch that StochasticWeightAveraging adds for batch norm statistics; and
            # nothing is known of the batch a checkpoint of a run without us ended with.
            if self._optimization._skip_backward or (window.batch is None and self._epoch_loop.restarting):
                return bool(inner())
            if self._epoch_loop.batch_progress.total.ready == window.batch:
                return window.is_full
            if self._is_processed:
                return False  # it was passed over: a batch that is None, or on_train_batch_start returned -1
            length = self._plan() if window.is_full else window.length - window.position
            return length == 1  # it has not begun: somebody asks in on_train_batch_start

        return reached

    def _make_run(self, inner: Method) -> Method:
        def run(optimizer: Optimizer, batch_idx: int, kwargs: dict[str, Any]) -> Any:
            if self._optimization._skip_backward:
                return inner(optimizer, batch_idx, kwargs)
            if self._window.is_full:
                self._window.open(self._plan())
            self._window.begin(self._epoch_loop.batch_progress.total.ready)
            self._trainer.accumulate_grad_batches = self._window.length
            with self._around(kwargs["batch"]):
                return inner(optimizer, batch_idx, kwargs)

        return run

    def _make_make_zero_grad(self, inner: Method) -> Method:
        def make_zero_grad(batch_idx: int, optimizer: Optimizer) -> Any:
            if self._optimization._skip_backward:
                return inner(batch_idx, optimizer)
            if not self._window.is_first:
                return None
            length = self._trainer.accumulate_grad_batches
            self._trainer.accumulate_grad_batches = 1  # of which any batch index is a multiple
            try:
                return inner(batch_idx, optimizer)
            finally:
                self._trainer.accumulate_grad_batches = length

        return make_zero_grad
