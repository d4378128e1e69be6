"""What a user's code does at the ends of a run is no part of a step: it writes files, and tells others of it."""

from collections.abc import Iterable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

_ENDS = (
    "on_train_epoch_end",
    "on_validation_epoch_end",
    "on_test_epoch_end",
    "on_predict_epoch_end",
    "on_train_end",
    "on_fit_end",
    "on_exception",
    "on_save_checkpoint",
    "teardown",
)
_OWN = "lightning_vram."


def silence_ends(module: pl.LightningModule, callbacks: Iterable[Callback]) -> None:
    """Leave out hooks that come after steps, of the user's code and Lightning's. Those of this package undo things.

    Args:
        module: A copy.
        callbacks: Copies.
    """
    for part in (module, *callbacks):
        if not type(part).__module__.startswith(_OWN):
            vars(part).update(dict.fromkeys((name for name in _ENDS if hasattr(part, name)), _do_nothing))


class StayOnCard(Callback):
    """Leave out that Lightning moves all back to the host once a run is over, tensor by tensor: a fifth of the work.

    Strategies and plugins of this package end in their own way, some with copies that belong on the host.
    """

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        parts = trainer.strategy, trainer.precision_plugin
        if not any(type(part).__module__.startswith(_OWN) for part in parts):
            vars(pl_module)["cpu"] = lambda: pl_module
            trainer.strategy.optimizers = []


def _do_nothing(*_: Any, **__: Any) -> None:
    """Stand in for a hook."""
