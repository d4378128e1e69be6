"""Log values of an optimizer step, also under manual optimization."""

from collections.abc import Mapping

import lightning.pytorch as pl
from torch import Tensor

from lightning_vram.private_names.lightning.logging import logging_from, logs_are_due, running_results


def is_logging(module: pl.LightningModule, *, always: bool = False) -> bool:
    """Whether somebody gets the values of this step; ``always``: whether anybody could."""
    trainer = module.trainer
    is_last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
    is_due = is_last or logs_are_due(trainer) or trainer.fast_dev_run  # type: ignore[attr-defined]
    return not trainer.barebones and running_results(trainer) is not None and bool(is_due or always)


def log_of_step(module: pl.LightningModule, values: Mapping[str, float | Tensor]) -> None:
    """Log them, where :func:`is_logging`."""
    # Under manual optimization the step ends where no hook runs that Lightning lets values be logged from.
    with logging_from(module, "optimizer_step"):
        for name, value in values.items():
            module.log(name, value, on_step=True, on_epoch=False, batch_size=1)
