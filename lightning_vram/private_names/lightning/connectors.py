"""Lightning's Trainer: its connectors, and where a run begins."""

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import lightning.pytorch as pl

RUN = "_run"  # of the trainer's class
SIGTERM_HANDLER = "_sigterm_notifier_fn"  # of the connector of signals


cluster_environment: Callable[[pl.Trainer], Any] = attrgetter("_accelerator_connector.cluster_environment")
"""Return what knows who has started the processes."""
checkpoint_connector: Callable[[pl.Trainer], Any] = attrgetter("_checkpoint_connector")
"""Return what loads checkpoints, by ``resume_start`` and ``restore``."""


def log_nothing(trainer: pl.Trainer) -> None:
    """Let loggers be there, and get nothing: it would be numbers."""
    trainer._logger_connector.log_metrics = lambda *_, **__: None  # type: ignore[method-assign]


def notes_of_run(trainer: pl.Trainer) -> dict[str, Any]:
    """Return notes that are there until the next run of ``trainer`` begins, or its data are attached."""
    notes: dict[str, Any] = vars(trainer._data_connector._datahook_selector).setdefault("lightning_vram", {})
    return notes


signal_connector: Callable[[pl.Trainer], Any] = attrgetter("_signal_connector")
"""Return what handles signals, until its ``teardown``."""


def validates_by_clock(trainer: pl.Trainer) -> bool:
    """Whether validation runs after a time, not after a number of batches."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


find_trainer: Callable[[pl.LightningModule], pl.Trainer | None] = attrgetter("_trainer")
"""Return the trainer of a module; ``None`` where the public property raises."""
