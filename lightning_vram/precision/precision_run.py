"""What the plugin has from the setup of a run to its teardown."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.core.optimizer import _MockOptimizer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer

from lightning_vram.precision.held_schedules import HeldSchedules
from lightning_vram.precision.module_changes import ModuleChanges
from lightning_vram.precision.precision_arguments import refuse_optimizers
from lightning_vram.techniques.loss_scaling import LossScaling


@dataclass
class PrecisionRun:
    """One run, with what it changes.

    Args:
        module: That runs.
        changes: Of the module.
        scaling: Of the loss, in float16, while it trains.
        held: Schedules that wait for steps that were skipped.
        is_deferring: Whether the scale is updated later: at the end of a ``training_step`` that steps by itself.
        has_stepped: Whether it is to be updated then.
        has_fallen_back: Whether it goes on without, after too many overflows.
    """

    module: pl.LightningModule
    changes: ModuleChanges
    scaling: LossScaling | None = None
    held: HeldSchedules | None = None
    is_deferring: bool = False
    has_stepped: bool = False
    has_fallen_back: bool = False

    def connect(
        self, optimizers: Sequence[Optimizer], schedules: Sequence[LRSchedulerConfig], *, holds_lr: bool
    ) -> None:
        """Take note of who trains.

        Raises:
            ValueError: If an optimizer cannot step the parameters as they are kept.
            MisconfigurationException: If one cannot work with a loss scale.
        """
        optimizers = [optimizer for optimizer in optimizers if not isinstance(optimizer, _MockOptimizer)]
        if self.scaling is not None:
            refuse_optimizers(optimizers)
        self.changes.attach(optimizers)
        if self.scaling is not None:
            self.scaling.watch(optimizers)
            if holds_lr and self.module.automatic_optimization and schedules:
                self.held = HeldSchedules(self.module, schedules)

    def over_ranks(self) -> Callable[[Tensor], Tensor] | None:
        """How ranks agree on an overflow: gradients that are not reduced, or sharded, may have it on one of them."""
        trainer = self.module.trainer
        if trainer.world_size == 1:
            return None
        return lambda found_inf: trainer.strategy.reduce(found_inf, reduce_op="sum")

    def remove(self) -> None:
        """Undo what was changed. Calling it again does nothing."""
        if self.held is not None:
            self.held.remove()
        self.changes.remove()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps of the run."""
        state: dict[str, Any] = {}
        if self.held is not None:
            state["held"] = self.held.state_dict()
        if self.changes.lean is not None:
            state["lean"] = self.changes.lean.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, with what both have."""
        if self.held is not None and "held" in state:
            self.held.load_state_dict(state["held"])
        if self.changes.lean is not None and "lean" in state:
            self.changes.lean.load_state_dict(state["lean"])
