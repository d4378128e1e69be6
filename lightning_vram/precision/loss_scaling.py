"""Loss scaling over several optimizer steps, and steps that are skipped because gradients overflowed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import lightning.pytorch as pl
import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from torch import Tensor
from torch.optim import Optimizer

from lightning_vram.core.patching import MethodPatch, replace_by
from lightning_vram.private_names.lightning import logging_from, logs_are_due, running_results
from lightning_vram.techniques.mixed_precision import LossScaling

OnLimit = Literal["error", "bf16", "fp32"]
ON_LIMIT = get_args(OnLimit)


@dataclass
class OverflowWatch:
    """Counts skipped steps, and reports when there are too many in a row."""

    max_consecutive: int | None  # None: no limit
    num_steps: int = 0
    num_consecutive: int = 0

    def note(self, num_overflowed: int) -> bool:
        """Count steps that belong to one scale, of which some overflowed; return whether it is too many."""
        self.num_steps += num_overflowed
        self.num_consecutive = self.num_consecutive + 1 if num_overflowed else 0
        return self.max_consecutive is not None and self.num_consecutive >= self.max_consecutive

    def log(self, module: pl.LightningModule, scaling: LossScaling) -> None:
        """Log ``vram/overflow_steps`` and ``vram/loss_scale`` of the step that ends."""
        if is_logging(module, always=self.num_consecutive > 0):
            values = {"vram/overflow_steps": float(self.num_steps), "vram/loss_scale": scaling.scale_value}
            log_of_step(module, values)

    def error(self, scale: float) -> FloatingPointError:
        """Return the error of too many steps in a row."""
        return FloatingPointError(
            f"LeanMixedPrecision(precision='fp16'): gradients overflowed in {self.num_consecutive} optimizer steps in "
            f"a row, down to a loss scale of {scale:g}: the training has diverged, or the model leaves the range of "
            "float16. Lower the learning rate, name the layers that overflow in fp32_modules=[...], use "
            "LeanMixedPrecision('bf16'), or on_overflow_limit='bf16' to continue in bfloat16."
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"num_steps": self.num_steps, "num_consecutive": self.num_consecutive}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a checkpoint."""
        self.num_steps, self.num_consecutive = int(state["num_steps"]), int(state["num_consecutive"])


def is_logging(module: pl.LightningModule, *, always: bool = False) -> bool:
    """Whether values of this step are logged; ``always``: whether they could be."""
    trainer = module.trainer
    is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    is_due = is_last or logs_are_due(trainer) or trainer.fast_dev_run  # type: ignore[attr-defined]
    return not trainer.barebones and running_results(trainer) is not None and bool(is_due or always)


def log_of_step(module: pl.LightningModule, values: Mapping[str, float | Tensor]) -> None:
    """Log values of a step, where :func:`is_logging`."""
    # Under manual optimization the step ends where no hook runs that Lightning lets values be logged from.
    with logging_from(module, "optimizer_step"):
        for name, value in values.items():
            module.log(name, value, on_step=True, on_epoch=False, batch_size=1)


class ScaledSteps:
    """Moves the scale once after all optimizer steps that follow one backward. Patches the scaler."""

    def __init__(
        self,
        scaler: torch.amp.GradScaler,
        over_ranks: Callable[[Tensor], Tensor] | None,  # how ranks agree on an overflow
        on_end: Callable[[int], None],  # gets the number of steps that were skipped
    ) -> None:
        self.scaling = LossScaling(scaler)
        self.is_deferring = False  # more steps may follow the same backward
        self.num_overflowed = 0  # since the scale moved
        self._has_stepped = False
        self._over_ranks = over_ranks
        self._on_end = on_end
        self._patches: list[MethodPatch] = []

    def begin(self, optimizers: Sequence[Optimizer]) -> None:
        """Keep the gradients of these optimizers correctly scaled from now on."""
        scaler = self.scaling.scaler
        self.scaling.watch(optimizers)
        if not self._patches and scaler.is_enabled():
            own: dict[str, Callable[..., Any]] = {"scale": self.scale, "unscale_": self.unscale, "step": self.step}
            own |= {"update": self._update, "get_scale": self._get_scale}
            self._patches = [MethodPatch(scaler, name, replace_by(call)) for name, call in own.items()]

    def remove(self) -> None:
        """Undo the patches of the scaler. Calling it again does nothing."""
        while self._patches:
            self._patches.pop().remove()

    def scale(self, loss: Any) -> Any:
        """Scale what backward is called on next; the scale moves first if there were steps."""
        self.end()
        return self.scaling.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Unscale the gradients of ``optimizer``, which may be wrapped, if they are scaled."""
        self.scaling.unscale(_without_wrapper(optimizer))

    def step(self, optimizer: Optimizer, **kwargs: Any) -> Any:
        """Step, or skip the step. Returns what ``optimizer.step`` does, ``None`` if it was skipped."""
        result = self.scaling.step(_without_wrapper(optimizer), self._over_ranks, **kwargs)
        self._has_stepped = True
        self.num_overflowed += result.overflowed
        if not self.is_deferring:
            self.end()
        return result.output

    def end(self) -> None:
        """Let the scale move, if there were steps since it did."""
        if self._has_stepped:
            num_overflowed, self.num_overflowed, self._has_stepped = self.num_overflowed, 0, False
            self.scaling.update()
            self._on_end(num_overflowed)

    def _update(self, new_scale: float | Tensor | None = None) -> None:
        self.end()
        if new_scale is not None:
            scaler = self.scaling.scaler
            type(scaler).update(scaler, new_scale)

    def _get_scale(self) -> float:
        """Return the scale after its pending change: much code reads it to see whether a step was skipped."""
        scaler = self.scaling.scaler
        return type(scaler).get_scale(scaler) * (scaler.get_backoff_factor() if self.num_overflowed else 1.0)


def _without_wrapper(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer itself: ``self.optimizers()`` of a LightningModule returns wrappers."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
