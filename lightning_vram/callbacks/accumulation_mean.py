"""Make the gradients of a window the mean over what it holds.

Lightning divides every loss by ``trainer.accumulate_grad_batches``. That is the mean while every window is full and
every micro-batch weighs the same. What is missing is a factor that is known when the window ends.
"""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from lightning_vram.callbacks.accumulation_weights import AccumulationWeights
from lightning_vram.callbacks.accumulation_window import AccumulationWindow
from lightning_vram.callbacks.shadow import Shadow
from lightning_vram.techniques.gradient_scaling import scale_gradients

Method = Callable[..., Any]


class AccumulationMean:
    """Stands in for the backward, and for what comes between it and the optimizer step, until :meth:`remove`.

    Gradients are corrected after the scaler's unscaling, before ``on_before_optimizer_step`` hooks and clipping. A
    window that is full and has no weights keeps the bits it has.

    Args:
        trainer: Whose optimizers are set up.
        window: Where the run stands.
        weights: What micro-batches weigh. ``None``: all the same.
    """

    def __init__(self, trainer: pl.Trainer, window: AccumulationWindow, weights: AccumulationWeights | None) -> None:
        self._window = window
        self._weights = weights
        self._optimization = trainer.fit_loop.epoch_loop.automatic_optimization
        self._factor: float | Tensor | None = None  # of the step under way
        self._shadows = [
            Shadow(self._optimization, "_make_backward_fn", self._make_make_backward),
            Shadow(trainer.precision_plugin, "_after_closure", self._make_after_closure),
        ]

    def begin(self, batch: Any) -> None:
        """Take note of a micro-batch that the window has begun."""
        self._factor = None
        if self._weights is not None:
            if self._window.is_first:
                self._weights.open()
            self._weights.begin(batch)

    def remove(self) -> None:
        """Put everything back. Calling it again does nothing."""
        for shadow in reversed(self._shadows):
            shadow.remove()

    def _make_make_backward(self, inner: Method) -> Method:
        def make_backward(optimizer: Optimizer) -> Any:
            backward = inner(optimizer)
            if backward is None:
                return None

            def scale_and_backward(loss: Tensor) -> None:
                is_new = self._window.hold()
                if self._weights is not None:
                    if is_new:
                        self._weights.add()
                    loss = self._weights.scale(loss)
                backward(loss)

            return scale_and_backward

        return make_backward

    def _make_after_closure(self, inner: Method) -> Method:
        def after_closure(model: pl.LightningModule, optimizer: Optimizer) -> Any:
            if self._optimization._skip_backward:
                return inner(model, optimizer)
            if self._factor is None:  # once per step: some optimizers call their closure several times
                self._factor = self._read_factor()
            if isinstance(self._factor, Tensor) or self._factor != 1:
                groups = [parameter for group in optimizer.param_groups for parameter in group["params"]]
                scale_gradients([*groups, *model.parameters()], self._factor)
            return inner(model, optimizer)

        return after_closure

    def _read_factor(self) -> float | Tensor:
        if self._weights is not None:
            return self._weights.factor(self._window.length)
        return self._window.length / self._window.num_held if self._window.num_held else 1.0
