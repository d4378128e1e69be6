"""Optimizer steps that are skipped because gradients overflowed: counted and logged."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import lightning.pytorch as pl
from torch import Tensor

from lightning_vram.private_names.lightning import logging_from, logs_are_due, running_results

OnLimit = Literal["error", "bf16", "fp32"]
ON_LIMIT = get_args(OnLimit)


@dataclass
class OverflowWatch:
    """Counts skipped steps, and reports when there are too many in a row."""

    max_consecutive: int | None  # None: no limit
    num_steps: int = 0
    num_consecutive: int = 0

    @property
    def is_too_many(self) -> bool:
        """Whether the limit is reached."""
        return self.max_consecutive is not None and self.num_consecutive >= self.max_consecutive

    def note(self, num_overflowed: int) -> None:
        """Count steps between two updates of the scale, of which some overflowed."""
        self.num_steps += num_overflowed
        self.num_consecutive = self.num_consecutive + 1 if num_overflowed else 0

    def log(self, module: pl.LightningModule, read_scale: Callable[[], float]) -> None:
        """Log ``vram/overflow_steps`` and ``vram/loss_scale`` of the step that ends."""
        if is_logging(module, always=self.num_consecutive > 0):
            log_of_step(module, {"vram/overflow_steps": float(self.num_steps), "vram/loss_scale": read_scale()})

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
    # Under manual optimization your hook may step, also one that Lightning lets no value of a step be logged from.
    with logging_from(module, "optimizer_step"):
        for name, value in values.items():
            module.log(name, value, on_step=True, on_epoch=False, batch_size=1)
