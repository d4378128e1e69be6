"""Gradient accumulation in one fit: every optimizer step is the mean over the micro-batches of its window.

Lightning divides every loss by ``trainer.accumulate_grad_batches``, the mean only of a full window of equal weights.
With weights ``w``, the mean is ``sum(w * gradient) / sum(w)`` over all micro-batches of all ranks. Losses are
multiplied by ``w`` as they come; gradients are divided by the sum, one reduced number, before the optimizer step.
"""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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

from lightning_vram.core.batches.micro_batches import BatchWeight, NormMomentum, find_batch_norms
from lightning_vram.core.gradients import scale_gradients
from lightning_vram.core.patching import MethodPatch
from lightning_vram.private_names import lightning as private_lightning
from lightning_vram.techniques.accumulation_schedule import AccumulationSchedule


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
        """Weigh the next batch, or the first one of a window. A collective until there is a weight above 0."""
        if is_first:
            self._sum = torch.zeros_like(self._sum)
        weight = self._weigh(batch)
        self.is_known_zero = (not isinstance(weight, Tensor) or weight.device.type == "cpu") and bool(weight == 0)
        if not isinstance(weight, Tensor):
            weight = torch.full_like(self._sum, weight)  # unlike torch.tensor, it does not wait for the device
        weight = weight.detach().to(self._device, self._dtype)
        if self._reference is None and (largest := self._reduced(weight, "MAX")) > 0:
            self._reference = largest / torch.frexp(largest).mantissa  # a power of two, which rounds nothing
        self._weight = weight if self._reference is None else weight / self._reference

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
    num_done: int = 1  # of them
    batch: int | None = None  # number of the last one in the run (``batch_progress.total.ready``); ``None`` before any
    num_begun: int = 0  # since the window, or the process that resumed it, began
    num_held: int = 0  # those of them with gradients
    is_running: bool = False  # whether there is one that has begun and is not done
    is_held: bool = False  # whether the current one counts already

    @property
    def is_full(self) -> bool:
        """Whether the optimizer steps with the current micro-batch."""
        return self.num_done + self.is_running >= self.length

    @property
    def is_first(self) -> bool:
        """Whether no earlier micro-batch of this window has gradients."""
        return self.num_begun <= 1

    def open(self, length: int) -> None:
        """Begin the next window."""
        self.length = length
        self.num_done = self.num_begun = self.num_held = 0

    @contextmanager
    def run(self, batch: int) -> Iterator[None]:
        """A micro-batch; one that fails is not done, and a checkpoint within it runs it again."""
        self.batch, self.is_held, self.is_running = batch, False, True
        self.num_begun += 1
        try:
            yield
            self.num_done += 1
        finally:
            self.is_running = False

    def hold(self) -> bool:
        """Count the current micro-batch, once for several backward passes; return whether it is the first."""
        is_new = not self.is_held
        self.num_held += is_new
        self.is_held = True
        return is_new

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint needs, without gradients."""
        return {"length": self.length, "num_done": self.num_done, "batch": self.batch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue in the middle of a window, without its gradients."""
        vars(self).update(vars(AccumulationWindow(**state_dict)))


def _swap_trainer_class(trainer: pl.Trainer, run: "AccumulationRun") -> Callable[[], None]:
    """Change a trainer's class to one of the same name with the true number of optimizer steps; return the undo.

    Learning rate schedules are made from the estimate, in ``configure_optimizers``. Lightning uses the factor of that
    moment: it estimates 16 where a schedule makes 10 steps. It is a property, which only a class can replace. A copy
    of the trainer, such as the one of a spawned worker process, has its original class.
    """
    original = type(trainer)

    def estimate(trainer: Any) -> int | float:
        lightning_estimate: int | float = original.estimated_stepping_batches.__get__(trainer)  # sets up the data
        if run.is_over or trainer.max_epochs == -1 or trainer.num_training_batches == float("inf"):
            return lightning_estimate
        steps = run.read_schedule().count_steps(trainer.num_training_batches, max(trainer.max_epochs, 1))
        return steps if trainer.max_steps == -1 else min(steps, trainer.max_steps)

    def reduce(trainer: Any, protocol: Any) -> Any:
        reduced: Any = original.__reduce_ex__(trainer, protocol)
        function, arguments, *others = reduced
        arguments = (original if one is swapped else one for one in arguments)
        return operator.call, (function, *arguments), *others  # pickle looks at the class if it knows the function

    attributes = {name: getattr(original, name) for name in ("__module__", "__qualname__", "__doc__")}
    changed = {"estimated_stepping_batches": property(estimate), "__reduce_ex__": reduce}
    swapped = type(original.__name__, (original,), attributes | changed)
    trainer.__class__ = swapped

    def undo() -> None:
        if type(trainer) is swapped:  # else another class was put over it, which stays and passes calls on
            trainer.__class__ = original

    return undo


class AccumulationRun:
    """Replaces methods of a trainer's loops, until :meth:`end`.

    Lightning decides by the batch index modulo ``trainer.accumulate_grad_batches``: where the factor changes, the
    gradients of a window that has not stepped would stay in the next one. Meanwhile that attribute is the length of the
    current window: Lightning divides by it. Without a ``schedule``, the factor follows from the training data, by
    ``plan_factor``.

    Gradients are corrected at the end of the closure that made them, before ``on_before_optimizer_step`` hooks and
    clipping. Those of a full window without weights stay bitwise identical. Without weights ranks do not differ in the
    factor: of several, Lightning refuses a step without a loss.
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
        self._given = schedule
        self._plan_factor = plan_factor
        self._epoch_loop = trainer.fit_loop.epoch_loop
        self._optimization = self._epoch_loop.automatic_optimization
        self._planned: tuple[object, AccumulationSchedule] | None = None  # with the loader that it was read from
        self.logged_factor: int | None = None
        self.is_over = False  # whether it has ended
        self._restore_class = _swap_trainer_class(trainer, self)
        self._patches = [MethodPatch(trainer.fit_loop, "setup_data", partial(partial, self._set_up_data))]
        if schedule is not None:
            self.set_factor()
        self._weights: AccumulationWeights | None = None
        self._norms: NormMomentum | None = None
        self._loss: Tensor | None = None  # the last one of the window

    @property
    def _begins_window(self) -> bool:
        # The first batch of an epoch also drops what an epoch that was cut short left, or a trial of a tuner.
        return self._window.is_full or self._epoch_loop.batch_progress.current.ready == 1

    def read_schedule(self) -> AccumulationSchedule:
        """Return the schedule; one that follows from the data is read again when the loader changes."""
        if self._given is not None:
            return self._given
        loader = private_lightning.training_data(self._trainer.fit_loop)
        if self._planned is None or self._planned[0] is not loader:
            self._planned = loader, AccumulationSchedule("epoch", (0,), (self._plan_factor(self._trainer),))
        return self._planned[1]

    def set_factor(self) -> int:
        """Set and return the factor of a window that begins now; hooks and tuners read it before the first one, too."""
        trainer = self._trainer
        factor = self.read_schedule().factor(trainer.current_epoch, trainer.global_step)
        trainer.accumulate_grad_batches = factor
        return factor

    def start(self, weights: AccumulationWeights | None) -> None:
        """Take over the loops: tuners train before any other hook."""
        self._weights = weights
        self._patches += [
            MethodPatch(self._optimization, private_lightning.MAKE_BACKWARD, partial(partial, self._make_backward)),
            MethodPatch(self._optimization, private_lightning.OPTIMIZER_STEP, partial(partial, self._optimizer_step)),
            MethodPatch(self._epoch_loop, private_lightning.WINDOW_ENDS, partial(partial, self._ends_window)),
            MethodPatch(self._optimization, "run", partial(partial, self._run_batch)),
            MethodPatch(self._optimization, private_lightning.MAKE_ZERO_GRAD, partial(partial, self._make_zero_grad)),
        ]

    def correct_batch_norms(self, *, is_asked: bool) -> None:
        """Move running statistics once per window, if asked; warn of layers that differ from one big batch."""
        if is_asked:
            self._norms = NormMomentum(self._trainer.lightning_module)
        names = find_batch_norms(self._trainer.lightning_module)
        if names:
            listed = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
            statistics = "corrected" if is_asked else "not corrected (correct_batch_norm=False)"
            rank_zero_warn(
                f"AccumulationScheduler: batch norm normalizes each micro-batch separately in {listed}. Running "
                f"statistics are {statistics}. Larger micro-batches, GroupNorm or frozen batch norm avoid this."
            )

    def end(self) -> None:
        """Put everything back. Calling it again does nothing."""
        for patch in reversed(self._patches):
            patch.remove()
        self._loss = None
        self._restore_class()
        if not self.is_over:
            self._trainer.accumulate_grad_batches = 1
        self.is_over = True

    def _set_up_data(self, inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = inner(*args, **kwargs)
        if private_lightning.training_data(self._trainer.fit_loop) is not None:
            self.set_factor()
        return result

    def _plan(self) -> int:
        """Return the length of a window that begins now."""
        trainer, factor = self._trainer, self.set_factor()
        if factor != self.logged_factor:
            self.logged_factor = factor
            for logger in trainer.loggers:
                logger.log_metrics({"vram/accumulate_grad_batches": float(factor)}, step=trainer.global_step)
        # What is left counts the current one.
        return int(max(1, min(factor, trainer.num_training_batches - self._epoch_loop.batch_idx)))

    def _ends_window(self, inner: Callable[[], Any]) -> bool:
        window, loop = self._window, self._epoch_loop
        # Nothing is accumulated in the epoch that StochasticWeightAveraging adds for batch norm statistics; and the
        # batch that a checkpoint of a run without this callback ended with is unknown.
        if private_lightning.skips_backward(self._optimization) or (window.batch is None and loop.restarting):
            return bool(inner())
        batch = loop.batch_progress.total.ready
        is_other = batch != window.batch
        progress: Any = loop.batch_progress.current
        if is_other and progress.processed < progress.ready:  # not begun: a hook asks in on_train_batch_start
            return (self._plan() if self._begins_window else window.length - window.num_done) == 1
        if is_other and progress.started < progress.ready and not loop.restarting:  # else none was read so far
            if not private_lightning.epoch_ends(loop):
                raise MisconfigurationException(
                    "AccumulationScheduler does not work with a batch that is None: ranks would not step together. "
                    "Leave such samples out in the dataset, or let training_step return None."
                )
            window.batch, window.num_done = batch, window.length  # on_train_batch_start returned -1
        return window.is_full

    def _run_batch(
        self, inner: Callable[..., Any], optimizer: Optimizer, batch_idx: int, kwargs: dict[str, Any]
    ) -> Any:
        if private_lightning.skips_backward(self._optimization):
            return inner(optimizer, batch_idx, kwargs)
        if self._begins_window:
            self._window.open(self._plan())
        with self._window.run(self._epoch_loop.batch_progress.total.ready):
            self._trainer.accumulate_grad_batches = self._window.length
            if self._weights is not None:
                self._weights.begin(kwargs["batch"], is_first=self._window.is_first)
            if self._norms is not None:
                self._norms.scale(1 / self._window.length)
            try:
                result = inner(optimizer, batch_idx, kwargs)
            finally:
                if self._norms is not None:  # copies, checkpoints and other callbacks see the momentum they know
                    self._norms.restore()
        if private_lightning.epoch_ends(self._epoch_loop):
            self._window.num_done = self._window.length  # Lightning has stepped; a stream does not announce it
        return result

    def _make_zero_grad(self, inner: Callable[..., Any], batch_idx: int, optimizer: Optimizer) -> Any:
        if not self._window.is_first:
            return None
        length = self._trainer.accumulate_grad_batches
        self._trainer.accumulate_grad_batches = 1  # of which any batch index is a multiple
        try:
            return inner(batch_idx, optimizer)
        finally:
            self._trainer.accumulate_grad_batches = length

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
        strategy, is_step = self._trainer.strategy, not private_lightning.is_accumulating(self._epoch_loop)
        if not isinstance(strategy, SingleDeviceStrategy) and (is_step or not isinstance(strategy, DDPStrategy)):
            return False
        # A window that holds nothing has gradients of 0, rather than none, for hooks that look at them.
        return not (is_step and self._window.num_held == 0 and bool(torch.isfinite(loss).all()))

    def _optimizer_step(self, inner: Callable[..., Any], batch_idx: int, closure: Callable[[], Any]) -> Any:
        if private_lightning.skips_backward(self._optimization):
            return inner(batch_idx, closure)
        has_run = False

        def run_closure() -> Any:
            nonlocal has_run
            if has_run and self._window.length > 1:
                raise MisconfigurationException(
                    "AccumulationScheduler does not work with an optimizer_step that calls its closure several times "
                    "per step, such as sharpness-aware minimization (SAM): each call would run the last micro-batch "
                    "only. Use larger batches or an optimizer that calls it once."
                )
            has_run = True
            loss = closure()
            self._correct_gradients()
            if not self._window.num_held:
                return None
            return self._loss if loss is None else loss  # a scaler takes None for a window without gradients

        return inner(batch_idx, run_closure)

    def _correct_gradients(self) -> None:
        window = self._window
        if self._weights is not None:
            factor: float | Tensor = self._weights.factor(window.length)
        else:
            factor = window.length / window.num_held if window.num_held else 1.0
        if isinstance(factor, Tensor) or factor != 1:
            # Gradients of other parameters are never zeroed: they would be multiplied again at each step.
            groups = (group for optimizer in self._trainer.optimizers for group in optimizer.param_groups)
            scale_gradients([parameter for group in groups for parameter in group["params"]], factor)
