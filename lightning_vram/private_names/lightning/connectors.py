"""Private names of Lightning's Trainer: what it is connected to, and where a run begins.

* ``lightning.pytorch.Trainer._run``: where each run begins | 2.6 - | a fit that a callback's error has cut short
  before its end leaves its schedule in ``trainer.estimated_stepping_batches``
* ``lightning.pytorch.Trainer._accelerator_connector``: knows who has started the processes | 2.6 -
  | SlurmRequeue fails at the start of a run
* ``lightning.pytorch.Trainer._checkpoint_connector``: where a checkpoint is read from | 2.6 -
  | SlurmRequeue fails at the start of a fit
* ``lightning.pytorch.Trainer._signal_connector``: has handlers of its own for signals | 2.6 -
  | SlurmRequeue fails at the start of a run under SLURM
* ``lightning.pytorch.trainer.connectors.signal_connector._SignalConnector._sigterm_notifier_fn``: the handler of
  SIGTERM, which waits for other ranks | 2.6 - | SlurmRequeue fails at the start of a run under SLURM
* ``lightning.pytorch.Trainer._data_connector``: knows the data of a run | 2.6 -
  | AutoVRAM and MemoryBudget fail at the start of a fit
* ``trainer._data_connector._datahook_selector``: made anew by each run | 2.6 -
  | AutoVRAM and MemoryBudget fail at the start of a fit
* ``lightning.pytorch.Trainer._logger_connector``: hands what is logged to loggers | 2.6 - | no run can be estimated
* ``trainer._val_check_time_interval``: whether the clock says when validation runs; not set before its arguments are
  read | 2.6 - | with ``val_check_interval`` as a time ranks may not agree where SlurmRequeue stops
* ``lightning.pytorch.LightningModule._trainer``: of a module that may have none | 2.6 -
  | errors of fsdp_offload about a lost rank fail themselves
"""

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
