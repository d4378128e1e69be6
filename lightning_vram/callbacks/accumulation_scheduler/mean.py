"""Make the gradients of an accumulation window the mean over its micro-batches.

Lightning divides every loss by ``trainer.accumulate_grad_batches``, the mean only of a full window of equal weights.
With weights ``w``, the mean is ``sum(w * gradient) / sum(w)`` over all micro-batches of all ranks. Losses are
multiplied by ``w`` as they come; gradients are divided by the sum, one reduced number, before the optimizer step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_vram.core.batches.micro_batches import BatchWeight
from lightning_vram.core.gradients import scale_gradients
from lightning_vram.core.patching import MethodPatch
from lightning_vram.private_names.lightning import (
    AFTER_CLOSURE,
    MAKE_BACKWARD,
    OPTIMIZER_STEP,
    is_accumulating,
    skips_backward,
)


class AccumulationWeights:
    """Weights of one window after the other. They stay on the device.

    Losses are in units of the first weight above 0, so that float16 stays in range. All ranks agree about it, by one
    more reduction for each batch until there is one; that is the only time the host waits for the device.
    """

    def __init__(self, weigh: BatchWeight, trainer: pl.Trainer) -> None:
        self._weigh = weigh
        self._device = trainer.strategy.root_device
        self._num_ranks = trainer.world_size
        self._dtype = torch.float32 if self._device.type == "mps" else torch.float64
        self._reference: Tensor | None = None
        self.is_known_zero = False  # whether the batch has weight 0, known without waiting for a device
        self._weight = self._sum = torch.zeros((), dtype=self._dtype, device=self._device)

    def begin(self, batch: Any, *, is_first: bool) -> None:
        """Weigh the next batch, or the first one of a window. All ranks call this or :meth:`pass_over`."""
        if is_first:
            self._sum = torch.zeros_like(self._sum)
        weight = self._weigh(batch)
        self.is_known_zero = (not isinstance(weight, Tensor) or weight.device.type == "cpu") and bool(weight == 0)
        if not isinstance(weight, Tensor):
            weight = torch.full_like(self._sum, weight)  # unlike torch.tensor, it does not wait for the device
        weight = weight.detach().to(self._device, self._dtype)
        self._find_reference(weight)
        self._weight = weight if self._reference is None else weight / self._reference

    def pass_over(self) -> None:
        """Take part in the reductions of the other ranks, without a batch."""
        self._find_reference(torch.zeros_like(self._sum))

    def scale(self, loss: Tensor, *, is_new: bool) -> Tensor:
        """Multiply a loss of the last batch by its weight, which counts once for several losses."""
        if is_new:
            self._sum = self._sum + self._weight
        return loss * self._weight.to(loss.device, loss.dtype)

    def factor(self, length: int) -> Tensor:
        """Return the factor of gradients whose losses were scaled and divided by ``length``. A collective.

        Gradients are averaged over the ranks before. The factor is 1 where all weights are 0.
        """
        mean = self._reduced(self._sum, "SUM") / self._num_ranks
        return torch.where(mean > 0, length / mean, 1)

    def _find_reference(self, weight: Tensor) -> None:
        if self._reference is not None:
            return
        largest = self._reduced(weight, "MAX")
        if largest > 0:
            self._reference = largest / torch.frexp(largest).mantissa  # a power of two, which rounds nothing

    def _reduced(self, value: Tensor, operation: str) -> Tensor:
        if self._num_ranks == 1:
            return value
        # strategy.reduce waits at a barrier each time
        value = value.clone()
        torch.distributed.all_reduce(value, op=getattr(torch.distributed.ReduceOp, operation))
        return value


@dataclass
class AccumulationWindow:
    """The micro-batches of one optimizer step: how many are planned, and how many have run.

    A window ends when it is full, or with its epoch; only then the next one is planned.
    """

    length: int = 1  # micro-batches planned
    position: int = 1  # of the current or last micro-batch, from 1
    batch: int | None = None  # number of that batch in the run (``batch_progress.total.ready``); ``None`` before any
    num_places: int = 0  # taken since the window, or the process that resumed it, began: equal on all ranks
    num_begun: int = 0  # micro-batches among them that were not missing
    num_held: int = 0  # those of them whose gradients count
    is_held: bool = False  # whether the current one counts already

    @property
    def is_full(self) -> bool:
        """Whether the optimizer steps with the current micro-batch."""
        return self.position >= self.length

    @property
    def is_first(self) -> bool:
        """Whether no earlier micro-batch of this window has gradients."""
        return self.num_begun <= 1

    def open(self, length: int) -> None:
        """Begin the next window."""
        self.length = length
        self.position = self.num_places = self.num_begun = self.num_held = 0

    def begin(self, batch: int) -> None:
        """Begin a micro-batch."""
        self.position += 1
        self.num_places += 1
        self.num_begun += 1
        self.batch = batch
        self.is_held = False

    def pass_over(self, batch: int) -> None:
        """Give a missing batch a place, so that ranks stay in step.

        The last place is left to the next batch: Lightning steps with a batch alone. Other ranks cannot have stepped
        at this one, since the step waits for all of them.
        """
        self.batch = batch
        if self.position < self.length - 1:
            self.position += 1
            self.num_places += 1

    def hold(self) -> bool:
        """Count the current micro-batch, once for several backward passes; return whether it is the first."""
        is_new = not self.is_held
        self.num_held += is_new
        self.is_held = True
        return is_new

    def state_dict(self, *, is_interrupted: bool) -> dict[str, Any]:
        """What a checkpoint needs, without gradients. If interrupted, the current micro-batch will run again."""
        return {"length": self.length, "position": self.position - is_interrupted, "batch": self.batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue in the middle of a window, without its gradients."""
        self.length, self.position, self.batch = (state_dict[key] for key in ("length", "position", "batch"))
        self.num_places = self.num_begun = self.num_held = 0
        self.is_held = False


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
            MethodPatch(self._optimization, MAKE_BACKWARD, partial(partial, self._make_backward)),
            MethodPatch(self._optimization, OPTIMIZER_STEP, partial(partial, self._optimizer_step)),
            MethodPatch(trainer.precision_plugin, AFTER_CLOSURE, partial(partial, self._after_closure)),
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

        steps: list[Any] = []
        optimizers = self._trainer.optimizers
        handles = [one.register_step_post_hook(lambda *_: steps.append(True)) for one in optimizers]
        try:
            result = inner(batch_idx, run_closure)
        finally:
            for handle in handles:
                handle.remove()
        if steps and num_calls and self._factor is None:
            self._warn_of_bypass()
        return result

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
