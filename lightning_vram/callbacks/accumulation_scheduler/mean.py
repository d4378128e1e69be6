"""Make the gradients of an accumulation window the mean over its micro-batches.

Lightning divides every loss by ``trainer.accumulate_grad_batches``. That is the mean while every window is full and
every micro-batch weighs the same. What is missing is a factor that is known when the window ends.

With weights ``w``, the mean is ``sum(w * gradient) / sum(w)`` over all micro-batches of all ranks. Losses are
multiplied by ``w`` as they come; gradients are divided by the sum before the optimizer step, by one reduction of one
number.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_vram.callbacks.accumulation_scheduler.weights import AccumulationWeights
from lightning_vram.callbacks.accumulation_scheduler.window import AccumulationWindow
from lightning_vram.core.gradients.scaling import scale_gradients
from lightning_vram.core.surgery.shadow import Shadow
from lightning_vram.private_names.lightning.loops import MAKE_BACKWARD, OPTIMIZER_STEP, is_accumulating, skips_backward
from lightning_vram.private_names.lightning.strategies import AFTER_CLOSURE


class AccumulationMean:
    """Replaces the backward, the optimizer step and what comes between them, until :meth:`remove`.

    Gradients are corrected after the scaler's unscaling, before ``on_before_optimizer_step`` hooks and clipping. Those
    of a full window without weights stay bitwise identical. Without weights ranks must not differ in the factor, and
    do not communicate about it: of several, a batch that is ``None`` counts as one without a gradient, as in Lightning.
    """

    def __init__(self, trainer: pl.Trainer, window: AccumulationWindow, weights: AccumulationWeights | None) -> None:
        self._trainer = trainer
        self._window = window
        self._weights = weights
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._optimization = self._epoch_loop.automatic_optimization
        self._factor: float | Tensor | None = None  # of the current step
        self._loss: Tensor | None = None  # the last one of the window
        self._has_warned = False
        self._patches = [
            Shadow(self._optimization, MAKE_BACKWARD, partial(partial, self._make_backward)),
            Shadow(self._optimization, OPTIMIZER_STEP, partial(partial, self._optimizer_step)),
            Shadow(trainer.precision_plugin, AFTER_CLOSURE, partial(partial, self._after_closure)),
        ]

    def begin(self, batch: Any) -> None:
        """Note a micro-batch that the window has begun."""
        self._factor = None
        if self._weights is not None:
            self._weights.begin(batch, is_first=self._window.is_first)

    def pass_over(self) -> None:
        """Note a batch that is missing."""
        if self._weights is not None:
            self._weights.pass_over()

    def remove(self) -> None:
        """Put everything back. Calling it again does nothing."""
        for patch in reversed(self._patches):
            patch.remove()
        self._loss = None

    def _make_backward(self, inner: Callable[..., Any], optimizer: Optimizer) -> Any:
        backward = inner(optimizer)
        return None if backward is None else partial(self._scale_and_backward, backward)

    def _scale_and_backward(self, backward: Callable[[Tensor], None], loss: Tensor) -> None:
        if self._skips_backward(loss):
            return
        self._loss = loss.detach()
        is_new = self._window.hold()
        if self._weights is not None:
            loss = self._weights.scale(loss, is_new=is_new)
        backward(loss)

    def _skips_backward(self, loss: Tensor) -> bool:
        """Whether the loss counts for nothing, and no rank waits for its backward: 0 * (0 / 0) is not 0."""
        if self._weights is None or not self._weights.is_known_zero:
            return False
        strategy, is_step = self._trainer.strategy, not is_accumulating(self._epoch_loop)
        if not isinstance(strategy, SingleDeviceStrategy) and (is_step or not isinstance(strategy, DDPStrategy)):
            return False
        # A window that holds nothing has gradients of 0, rather than none, for hooks that look at them.
        return not (is_step and self._window.num_held == 0 and bool(torch.isfinite(loss).all()))

    def _optimizer_step(self, inner: Callable[..., Any], batch_idx: int, closure: Callable[[], Any]) -> Any:
        if skips_backward(self._optimization):
            return inner(batch_idx, closure)
        num_calls = 0

        def run_closure() -> Any:
            nonlocal num_calls
            num_calls += 1
            if num_calls > 1 and self._window.length > 1:
                raise MisconfigurationException(
                    "AccumulationScheduler does not work with an optimizer_step that calls its closure several times "
                    "per step, such as sharpness-aware minimization (SAM): each call would run the last micro-batch "
                    "only. Use larger batches or an optimizer that calls it once."
                )
            loss = closure()
            if loss is None and self._window.num_held:
                return self._loss  # a scaler takes None for a window without gradients
            return loss if self._window.num_held else None

        with self._watched_steps() as steps:
            result = inner(batch_idx, run_closure)
        if steps and num_calls and self._factor is None:
            self._warn_of_bypass()
        return result

    @contextmanager
    def _watched_steps(self) -> Iterator[list[Any]]:
        steps: list[Any] = []
        handles = [
            optimizer.register_step_post_hook(lambda *_: steps.append(True)) for optimizer in self._trainer.optimizers
        ]
        try:
            yield steps
        finally:
            for handle in handles:
                handle.remove()

    def _warn_of_bypass(self) -> None:
        if self._has_warned or (self._weights is None and self._read_factor() == 1):
            return
        self._has_warned = True
        rank_zero_warn(
            "AccumulationScheduler: optimizer_step of the LightningModule bypasses the strategy, so that its "
            "gradients are not the mean over the accumulated batches, and hooks and clipping are skipped. Call "
            "optimizer.step(closure=optimizer_closure) on the optimizer that it receives."
        )

    def _after_closure(self, inner: Callable[..., Any], model: pl.LightningModule, optimizer: Optimizer) -> Any:
        if skips_backward(self._optimization):
            return inner(model, optimizer)
        if self._factor is None:  # once per step: some optimizers call their closure several times
            self._factor = self._read_factor()
        if isinstance(self._factor, Tensor) or self._factor != 1:
            # Gradients of other parameters are never zeroed: they would be multiplied again at each step.
            scale_gradients([p for group in optimizer.param_groups for p in group["params"]], self._factor)
        return inner(model, optimizer)

    def _read_factor(self) -> float | Tensor:
        if self._weights is not None:
            return self._weights.factor(self._window.length)
        num_counted = self._window.num_held if self._trainer.world_size == 1 else self._window.num_places
        return self._window.length / num_counted if num_counted else 1.0
