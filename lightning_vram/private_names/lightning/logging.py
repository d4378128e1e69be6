"""Private names of Lightning's logging: what ``self.log`` collects, and what a trainer shows of it."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _get_default_dtype,
    _Metadata,
    _ResultCollection,
)

ResultCollection = _ResultCollection
Metadata = _Metadata


default_dtype: Callable[[], torch.dtype] = _get_default_dtype
"""Return the dtype that values are logged in."""
running_results: Callable[[pl.Trainer], ResultCollection | None] = attrgetter("_results")
"""Return what the running loop has logged; ``None`` if none runs that logs."""
logs_are_due: Callable[[pl.Trainer], bool] = attrgetter("_logger_connector.should_update_logs")
"""Whether loggers get the values of this step."""


@contextmanager
def logging_from(module: pl.LightningModule, hook: str) -> Iterator[None]:
    """Let ``module.log`` take itself to be called in ``hook``."""
    before, module._current_fx_name = module._current_fx_name, hook
    try:
        yield
    finally:
        module._current_fx_name = before


def runs_in_hook(module: pl.LightningModule, hook: str) -> bool:
    """Whether the hook of ``module`` that is running is the one of that name."""
    return module._current_fx_name == hook


def update_metrics(trainer: pl.Trainer, kind: str, values: Mapping[str, Any]) -> None:
    """Add to the trainer's ``callback_metrics``, ``logged_metrics`` or ``progress_bar_metrics``."""
    connector = trainer._logger_connector
    metrics: dict[str, dict[str, Any]] = {
        "callback_metrics": connector._callback_metrics,
        "logged_metrics": connector._logged_metrics,
        "progress_bar_metrics": connector._progress_bar_metrics,
    }
    metrics[kind].update(values)
