"""The base of callbacks that apply a technique during a fit."""

from abc import ABC, abstractmethod
from typing import ClassVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_vram.callbacks.hook_points.before_strategy_setup import (
    before_strategy_setup,
    withdraw_from_strategy_setup,
)
from lightning_vram.callbacks.hook_points.checks import check_trainer


class FitTechnique(Callback, ABC):
    """Applies right before the strategy is set up, to a complete, unwrapped module; undoes it however the fit ends."""

    _stages: ClassVar[tuple[str, ...]] = ("fit",)  # in which it applies

    @abstractmethod
    def _apply(self, trainer: pl.Trainer) -> None:
        """Apply the technique to ``trainer.lightning_module``. If it raises, the run ends there."""

    @abstractmethod
    def _undo(self) -> None:
        """Undo what was applied, if it was. Called more than once."""

    def _check(self, trainer: pl.Trainer) -> None:
        """Refuse what the technique cannot work with, before anything else of the fit happens."""

    def start_late(self, trainer: pl.Trainer) -> None:
        """Apply between two steps of a running fit, to a module that is wrapped, on its device and has optimizers."""
        check_trainer(type(self).__name__, trainer)
        self._check(trainer)
        self._apply(trainer)

    def give_up(self) -> None:
        """Undo it at the end of a run: nothing is moved back to a device that may be full."""
        self._undo()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_trainer(type(self).__name__, trainer)
        self._undo()  # another callback's error may have cut the end of the last run short
        if stage in self._stages:
            self._check(trainer)
            before_strategy_setup(trainer, lambda: self._apply(trainer))

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._undo()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        withdraw_from_strategy_setup(trainer)
        self._undo()
