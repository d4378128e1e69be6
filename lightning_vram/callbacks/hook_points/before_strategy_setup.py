"""The moment at which a callback may change the module: complete, restored, not yet wrapped or moved."""

from collections.abc import Callable
from functools import partial

import lightning.pytorch as pl

from lightning_vram.core.surgery.shadow import Shadow


class _BeforeStrategySetup(Shadow):
    """Replaces ``strategy.setup`` for one call: removes itself, runs the actions in order, then calls it.

    ``Callback.setup`` runs before ``LightningModule.configure_model``: layers made there do not exist yet, and
    Lightning has no hook between the two. ``Strategy.setup`` comes right after, before precision conversion, device
    moves, DDP or FSDP wrapping and ``configure_optimizers``.
    """

    def __init__(self, strategy: pl.strategies.Strategy) -> None:
        self.actions: list[Callable[[], None]] = []
        super().__init__(strategy, "setup", partial(partial, self._run))

    def _run(self, setup: Callable[[pl.Trainer], None], trainer: pl.Trainer) -> None:
        actions = self.actions
        self.withdraw()
        for action in actions:
            action()
        setup(trainer)

    def withdraw(self) -> None:
        self.actions = []
        self.remove()


def before_strategy_setup(trainer: pl.Trainer, action: Callable[[], None]) -> None:
    """Run ``action`` right before the next ``trainer.strategy.setup``, once, in order of registration."""
    patch = vars(trainer.strategy).get("setup")
    if not isinstance(patch, _BeforeStrategySetup) or not patch.actions:  # one without only passes calls on
        patch = _BeforeStrategySetup(trainer.strategy)
    patch.actions.append(action)


def withdraw_from_strategy_setup(trainer: pl.Trainer) -> None:
    """Forget all actions: for a run that ended before its strategy was set up."""
    patch = vars(trainer.strategy).get("setup")
    if isinstance(patch, _BeforeStrategySetup):
        patch.withdraw()
