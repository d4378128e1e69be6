"""Private names of Lightning's own callbacks: its tuners, ``ModelCheckpoint`` and ``WeightAveraging``."""

from collections.abc import Callable, Iterable
from operator import attrgetter

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder, ModelCheckpoint, WeightAveraging
from lightning.pytorch.tuner.lr_finder import _LRCallback
from torch.optim.swa_utils import AveragedModel

SWAP_WITH_AVERAGE = WeightAveraging._swap_models.__name__
PUT_AVERAGE = WeightAveraging._copy_average_to_current.__name__


batch_size_argument: Callable[[BatchSizeFinder], str] = attrgetter("_batch_arg_name")
"""Return the name of the argument that is searched for."""
sets_learning_rate: Callable[[LearningRateFinder], bool] = attrgetter("_update_attr")
"""Whether the learning rate found is set."""
learning_rate_argument: Callable[[LearningRateFinder], str] = attrgetter("_attr_name")
"""Return the name of the argument that is searched for; empty: Lightning looks for it."""


def is_searching_rate(callbacks: Iterable[Callback]) -> bool:
    """Whether a search for the learning rate is under way."""
    return any(isinstance(callback, _LRCallback) for callback in callbacks)


def last_checkpoints(callback: ModelCheckpoint, trainer: pl.Trainer) -> set[str]:
    """Return the paths of what ``save_last=True`` has written."""
    return callback._find_last_checkpoints(trainer)


average_of: Callable[[WeightAveraging], AveragedModel | None] = attrgetter("_average_model")
"""Return the average; ``None`` before the first fit."""


def averaging_callbacks(trainer: pl.Trainer | None) -> list[WeightAveraging]:
    """Return those of a trainer that have an average."""
    callbacks: list[Callback] = [] if trainer is None else trainer.callbacks  # type: ignore[attr-defined]
    return [one for one in callbacks if isinstance(one, WeightAveraging) and average_of(one) is not None]
