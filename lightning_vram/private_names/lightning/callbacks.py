"""Private names of Lightning's own callbacks: its tuners, ``ModelCheckpoint`` and ``WeightAveraging``."""

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
