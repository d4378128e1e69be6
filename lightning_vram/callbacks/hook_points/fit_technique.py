"""The frame of callbacks that apply a technique for the time of a fit, and undo it however the fit ends."""

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
    """Applies right before the strategy is set up, when the module is complete and not yet wrapped or moved."""

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
        """Apply between two steps of a fit that is on its way, instead of in :meth:`setup`.

        For techniques that do not mind a module that is wrapped, on its device and has optimizers.

        Raises:
            MisconfigurationException: If the technique does not work with the trainer.
        """
        check_trainer(type(self).__name__, trainer)
        self._check(trainer)
        self._apply(trainer)

    def give_up(self) -> None:
        """Undo it at once, for a run that is over: nothing is moved back to a device that may be full."""
        self._undo()

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        check_trainer(type(self).__name__, trainer)
        self._undo()  # a run whose end another callback's error cut short
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
