"""The moment at which a callback may change the module: complete, restored, not yet wrapped or moved.

``Callback.setup`` runs before ``LightningModule.configure_model``: layers made there do not exist yet, and Lightning
has no hook between the two. ``Strategy.setup`` comes right after, before precision conversion, device moves, DDP or
FSDP wrapping and ``configure_optimizers``. It is shadowed on the strategy for one call.
"""

from collections.abc import Callable
from functools import partial

import lightning.pytorch as pl

from lightning_vram.core.surgery.shadow import Shadow

Action = Callable[[], None]


class _BeforeStrategySetup(Shadow):
    """Stands in for ``strategy.setup`` once: steps aside, runs the actions in order, then calls it."""

    def __init__(self, strategy: pl.strategies.Strategy) -> None:
        self.actions: list[Action] = []
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


def before_strategy_setup(trainer: pl.Trainer, action: Action) -> None:
    """Run ``action`` right before the coming ``trainer.strategy.setup``, once. Actions run in order of registration.

    Args:
        trainer: A trainer that is in its ``setup`` hooks.
        action: What to do with ``trainer.lightning_module``. If it raises, the run ends there.
    """
    shadow = vars(trainer.strategy).get("setup")
    if not isinstance(shadow, _BeforeStrategySetup) or not shadow.actions:  # one without only passes calls on
        shadow = _BeforeStrategySetup(trainer.strategy)
    shadow.actions.append(action)


def withdraw_from_strategy_setup(trainer: pl.Trainer) -> None:
    """Forget all actions: for a run that ended before its strategy was set up."""
    shadow = vars(trainer.strategy).get("setup")
    if isinstance(shadow, _BeforeStrategySetup):
        shadow.withdraw()
