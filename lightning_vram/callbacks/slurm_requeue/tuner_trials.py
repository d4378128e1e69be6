"""Keep the trials of Lightning's tuners apart from the fit that they are made in."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, LearningRateFinder
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_vram.core.surgery.shadow import Shadow, instead
from lightning_vram.private_names.lightning.callbacks import (
    batch_size_argument,
    learning_rate_argument,
    sets_learning_rate,
)
from lightning_vram.private_names.lightning.connectors import checkpoint_connector


class TunerTrials:
    """Trials of the tuners in one fit."""

    # A tuner tries batch sizes or learning rates within the fit, without the trainer's callbacks, and returns to a
    # checkpoint of its own. In a resumed fit it does so between the two halves in which Lightning loads a checkpoint:
    # the fit would begin at step 0 again (Lightning 2.6). So it does not search there, and uses what it found before.

    def __init__(self, trainer: pl.Trainer) -> None:
        self.are_undone = False  # whether a tuner is loading the state before its trials
        self._trainer = trainer
        self._undo = Shadow(
            checkpoint_connector(trainer), "restore", partial(partial, self._restore)
        )  # only tuners call it
        self._searches: list[Shadow] = []

    def state_dict(self) -> dict[str, Any]:
        """Return the values that were found, by the name of the argument."""
        module = self._trainer.lightning_module
        names = [name for tuner in self._tuners() for name in _argument_names(tuner)]
        return {name: lightning_getattr(module, name) for name in names if lightning_hasattr(module, name)}

    def skip(self, found: dict[str, Any]) -> None:
        """Set what :meth:`state_dict` found, and prevent searches before training starts."""
        module = self._trainer.lightning_module
        for tuner in self._tuners():
            names = [name for name in _argument_names(tuner) if name in found and lightning_hasattr(module, name)]
            for name in names:
                lightning_setattr(module, name, found[name])
            values = ", ".join(f"{name}={found[name]}" for name in names)
            rank_zero_info(f"{type(tuner).__name__}: this fit is resumed, with {values or 'what it was given'}.")
            if not self._trainer.strategy.restore_checkpoint_after_setup:  # else it has searched, which is undone now
                search = "lr_find" if isinstance(tuner, LearningRateFinder) else "scale_batch_size"
                self._searches.append(Shadow(tuner, search, instead(_find_nothing)))

    def allow(self) -> None:
        """Let tuners search again: some do so at later epochs."""
        for search in reversed(self._searches):
            search.remove()
        self._searches = []

    def remove(self) -> None:
        """Leave trainer and tuners as they were. Calling it again does nothing."""
        self.allow()
        self._undo.remove()

    def _tuners(self) -> Iterator[Callback]:
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        return (callback for callback in callbacks if isinstance(callback, (BatchSizeFinder, LearningRateFinder)))

    def _restore(self, restore: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        self.are_undone = True
        try:
            restore(*args, **kwargs)
        finally:
            self.are_undone = False


def _argument_names(tuner: Any) -> tuple[str, ...]:
    if isinstance(tuner, BatchSizeFinder):
        return (batch_size_argument(tuner),)
    if not sets_learning_rate(tuner):
        return ()
    name = learning_rate_argument(tuner)
    return (name,) if name else ("lr", "learning_rate")  # Lightning looks in this order


def _find_nothing(*args: Any, **kwargs: Any) -> None:
    """Replaces a search."""
