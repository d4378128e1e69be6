"""Show one more value in whatever progress bar the trainer has."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl


class ProgressBarItem:
    """An item in the progress bar, TQDM's, Rich's or a user's: ``get_metrics`` is their common ground.

    Args:
        name: Text before the value.
        read: Returns the value, or ``None`` for nothing to show yet.
    """

    def __init__(self, name: str, read: Callable[[], str | None]) -> None:
        self._name = name
        self._read = read
        self._bar: Any = None

    def attach(self, trainer: pl.Trainer) -> None:
        """Shadow ``get_metrics`` of the trainer's bar, if it has one, until :meth:`detach`."""
        self._bar = trainer.progress_bar_callback
        if self._bar is not None:
            self._bar.get_metrics = self._get_metrics

    def detach(self) -> None:
        """Give the bar its own ``get_metrics`` back."""
        if self._bar is not None:
            vars(self._bar).pop("get_metrics", None)
            self._bar = None

    def _get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        items: dict[str, Any] = type(self._bar).get_metrics(self._bar, trainer, pl_module)
        value = self._read()
        return {**items, self._name: value} if value is not None else items
