"""What the plugin has from the setup of a run to its teardown."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import gcd
from typing import Any
from weakref import WeakSet

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerStatus
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_vram.core.surgery.shadow import Shadow
from lightning_vram.optimizers.lean import LeanAverage
from lightning_vram.precision.averages import average_exact_weights
from lightning_vram.precision.module_changes import ModuleChanges
from lightning_vram.precision.overflow_watch import is_logging, log_of_step
from lightning_vram.precision.scaled_steps import ScaledSteps
from lightning_vram.private_names.lightning.strategies import MockOptimizer


class PausedSchedules:
    """Keeps ``lr_scheduler_step`` of a LightningModule from counting skipped steps, until :meth:`remove`."""

    # Lightning steps a schedule after every batch that could have stepped the optimizer: 16 times where gradients of 12
    # batches overflowed and 4 steps were made. Schedules that count epochs are left unchanged.

    def __init__(self, module: pl.LightningModule, configs: Sequence[LRSchedulerConfig]) -> None:
        self._trainer = module.trainer
        self._configs = [config for config in configs if config.interval == "step"]
        self._num_missed = [0] * len(self._configs)  # steps of the optimizer that a schedule has to wait for
        self._patch = Shadow(module, "lr_scheduler_step", partial(partial, self._step))

    def pause(self) -> None:
        """Count an optimizer step that was skipped."""
        self._num_missed = [number + 1 for number in self._num_missed]

    def remove(self) -> None:
        """Let schedules step as before. Calling it again does nothing."""
        self._patch.remove()

    def state_dict(self) -> list[int]:
        """State for a checkpoint."""
        return list(self._num_missed)

    def load_state_dict(self, state: Sequence[int]) -> None:
        """Resume from a checkpoint; the state of other schedules is ignored."""
        if len(state) == len(self._num_missed):
            self._num_missed = list(state)

    def _step(self, inner: Callable[..., Any], scheduler: Any, /, *args: Any, **kwargs: Any) -> None:
        for index, config in enumerate(self._configs):
            # optimizer steps between two of the schedule, which Lightning counts in batches
            num_steps = config.frequency // gcd(config.frequency, self._trainer.accumulate_grad_batches)
            if config.scheduler is scheduler and self._num_missed[index] >= num_steps:
                self._num_missed[index] -= num_steps
                return
        inner(scheduler, *args, **kwargs)


# Key of the module's own weights in a checkpoint of Lightning's WeightAveraging, which has the average as its weights.
_CURRENT = "current_model_state"

_alive: WeakSet["PrecisionRun"] = WeakSet()


@dataclass(eq=False)
class PrecisionRun:
    """One run, with what it changes."""

    module: pl.LightningModule
    trainer: pl.Trainer
    changes: ModuleChanges
    steps: ScaledSteps | None = None  # in float16, while it trains
    paused: PausedSchedules | None = None
    has_warned: bool = False  # whether the first training step is over
    averages: list[Shadow | LeanAverage] = field(default_factory=list)

    def __post_init__(self) -> None:
        lean = self.changes.lean
        if lean is not None:
            self.averages = average_exact_weights(self.trainer, self.module, lean)
        if lean is not None and self.changes.settings.check_updates:
            lean.check_updates(partial(is_logging, self.module))
        _alive.add(self)

    def connect(
        self, optimizers: Sequence[Optimizer], schedules: Sequence[LRSchedulerConfig], *, holds_lr: bool
    ) -> None:
        """Register the optimizers and schedules of a fit."""
        optimizers = [optimizer for optimizer in optimizers if not isinstance(optimizer, MockOptimizer)]
        if self.steps is not None and any(isinstance(optimizer, LBFGS) for optimizer in optimizers):
            raise MisconfigurationException(
                "LeanMixedPrecision(precision='fp16') does not work with LBFGS, which evaluates the loss several times "
                "per step, and cannot skip one that overflows. Use precision='bf16', or another optimizer."
            )
        self.changes.attach(optimizers)
        if self.steps is not None:
            self.steps.begin(optimizers)
            if holds_lr and self.module.automatic_optimization and schedules:
                self.paused = PausedSchedules(self.module, schedules)

    def end_scaling(self) -> None:
        """Continue without a scale. Calling it again does nothing."""
        if self.steps is not None:
            self.steps.remove()
            self.steps = None

    def log_lost_updates(self) -> None:
        """Log the share of updates that rounding has taken back in the step before, if it was counted."""
        share = None if self.changes.lean is None else self.changes.lean.lost_updates
        if share is not None:
            log_of_step(self.module, {"vram/lost_updates": share})

    def warn_of_idle_islands(self) -> None:
        """Warn once, after a training step, of ``fp32_modules`` that it did not call."""
        if self.has_warned:
            return
        self.has_warned = True
        if names := self.changes.idle_islands:
            rank_zero_warn(
                f"LeanMixedPrecision(fp32_modules): the first training step did not call {', '.join(names)}. A module "
                "that reads their weights computes in 16 bits. Name the module that is called, for example "
                "nn.MultiheadAttention instead of its out_proj."
            )

    def over_ranks(self) -> Callable[[Tensor], Tensor] | None:
        """How ranks agree on an overflow: gradients that are not reduced, or sharded, may have it on one of them."""
        if self.trainer.world_size == 1:
            return None
        return lambda found_inf: self.trainer.strategy.reduce(found_inf, reduce_op="sum")

    def remove(self) -> None:
        """Undo what was changed. Calling it again does nothing."""
        if self.paused is not None:
            self.paused.remove()
        self.end_scaling()
        for change in self.averages:
            change.remove()
        self.changes.remove()
        _alive.discard(self)

    def load_weights(self, checkpoint: Mapping[str, Any]) -> None:
        """Load weights of a checkpoint exactly; with averaging it has them under another key."""
        has_average = bool(self.averages) and _CURRENT in checkpoint
        self.changes.load_weights(checkpoint.get(_CURRENT if has_average else "state_dict", {}))

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint."""
        parts = {"held": self.paused, "lean": self.changes.lean}
        return {name: part.state_dict() for name, part in parts.items() if part is not None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint, with what both have."""
        if self.paused is not None and "held" in state:
            self.paused.load_state_dict(state["held"])
        if self.changes.lean is not None and "lean" in state:
            self.changes.lean.load_state_dict(state["lean"])


def undo_interrupted_runs() -> None:
    """Undo what runs have left behind whose trainer was interrupted in its own teardown."""
    for run in list(_alive):
        if run.trainer.state.status in (TrainerStatus.INTERRUPTED, TrainerStatus.FINISHED):
            run.remove()
