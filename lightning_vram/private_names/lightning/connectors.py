"""Private names of Lightning's Trainer: what it is connected to, and where a run begins."""

from typing import Any

import lightning.pytorch as pl

RUN = "_run"  # of the trainer's class
SIGTERM_HANDLER = "_sigterm_notifier_fn"  # of the connector of signals


def cluster_environment(trainer: pl.Trainer) -> Any:
    """Return what knows who has started the processes."""
    return trainer._accelerator_connector.cluster_environment


def checkpoint_connector(trainer: pl.Trainer) -> Any:
    """Return what loads checkpoints, by ``resume_start`` and ``restore``."""
    return trainer._checkpoint_connector


def log_nothing(trainer: pl.Trainer) -> None:
    """Let loggers be there, and get nothing: it would be numbers."""
    trainer._logger_connector.log_metrics = lambda *_, **__: None  # type: ignore[method-assign]


def notes_of_run(trainer: pl.Trainer) -> dict[str, Any]:
    """Return notes that are there until the next run of ``trainer`` begins, or its data are attached."""
    notes: dict[str, Any] = vars(trainer._data_connector._datahook_selector).setdefault("lightning_vram", {})
    return notes


def signal_connector(trainer: pl.Trainer) -> Any:
    """Return what handles signals, until its ``teardown``."""
    return trainer._signal_connector


def validates_by_clock(trainer: pl.Trainer) -> bool:
    """Whether validation runs after a time, not after a number of batches."""
    return getattr(trainer, "_val_check_time_interval", None) is not None


def find_trainer(module: pl.LightningModule) -> pl.Trainer | None:
    """Return the trainer of a module; ``None`` where the public property raises."""
    return module._trainer
