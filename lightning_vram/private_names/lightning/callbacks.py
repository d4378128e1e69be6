"""Private names of Lightning's own callbacks: its tuners, ``ModelCheckpoint`` and ``WeightAveraging``.

* ``lightning.pytorch.callbacks.BatchSizeFinder._batch_arg_name``: which argument it sets | 2.6 -
  | SlurmRequeue cannot save where there is a BatchSizeFinder
* ``lightning.pytorch.callbacks.LearningRateFinder._update_attr``: whether it sets one | 2.6 -
  | SlurmRequeue cannot save where there is a LearningRateFinder
* ``lightning.pytorch.callbacks.LearningRateFinder._attr_name``: which one | 2.6 -
  | SlurmRequeue cannot save where there is a LearningRateFinder
* ``lightning.pytorch.tuner.lr_finder._LRCallback``: there while a learning rate is searched for | 2.6 -
  | the package cannot be imported
* ``lightning.pytorch.callbacks.ModelCheckpoint._find_last_checkpoints``: what ``save_last=True`` has written | 2.6 -
  | SlurmRequeue fails at a restart where there is a ModelCheckpoint
* ``lightning.pytorch.callbacks.WeightAveraging._average_model``: the average, from the setup of a fit on | 2.6 -
  | WeightAveraging fails under fsdp_offload, and with LeanMixedPrecision(parameters="bf16+...")
* ``lightning.pytorch.callbacks.WeightAveraging._swap_models``: module and average change places | 2.6 -
  | the package cannot be imported
* ``lightning.pytorch.callbacks.WeightAveraging._copy_average_to_current``: gives the module the average | 2.6 -
  | the package cannot be imported
"""

from collections.abc import Iterable

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder, ModelCheckpoint, WeightAveraging
from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch.optim.swa_utils import AveragedModel

SWAP_WITH_AVERAGE = WeightAveraging._swap_models.__name__
PUT_AVERAGE = WeightAveraging._copy_average_to_current.__name__


def batch_size_argument(tuner: BatchSizeFinder) -> str:
    """Return the name of the argument that is searched for."""
    return tuner._batch_arg_name


def sets_learning_rate(tuner: LearningRateFinder) -> bool:
    """Whether what is found is set."""
    return tuner._update_attr


def learning_rate_argument(tuner: LearningRateFinder) -> str:
    """Return the name of the argument that is searched for; empty: Lightning looks for it."""
    return tuner._attr_name


def is_searching_rate(callbacks: Iterable[Callback]) -> bool:
    """Whether a search for the learning rate is under way."""
    return any(isinstance(callback, _LRCallback) for callback in callbacks)


def last_checkpoints(callback: ModelCheckpoint, trainer: pl.Trainer) -> set[str]:
    """Return the paths of what ``save_last=True`` has written."""
    return callback._find_last_checkpoints(trainer)


def average_of(callback: WeightAveraging) -> AveragedModel | None:
    """Return the average; ``None`` before the first fit."""
    return callback._average_model


def averaging_callbacks(trainer: pl.Trainer | None) -> list[WeightAveraging]:
    """Return those of a trainer that have an average."""
    callbacks: list[Callback] = [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
    return [one for one in callbacks if isinstance(one, WeightAveraging) and average_of(one) is not None]
