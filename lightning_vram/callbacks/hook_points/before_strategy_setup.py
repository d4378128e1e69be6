"""The moment at which a callback may change the module: complete, restored, not yet wrapped or moved.

``Callback.setup`` runs before ``LightningModule.configure_model``: layers made there do not exist yet, and Lightning
has no hook between the two. ``Strategy.setup`` comes right after, before precision conversion, device moves, DDP or
FSDP wrapping and ``configure_optimizers``. It is shadowed on the strategy for one call.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import lightning.pytorch as pl

from lightning_vram.core.surgery.shadow import pass_on

Action = Callable[[], None]


class _BeforeStrategySetup:
    """Stands in for ``strategy.setup`` once: steps aside, runs the actions in order, then calls it."""

    def __init__(self, strategy: pl.strategies.Strategy) -> None:
        self.strategy = strategy
        self.actions: list[Action] = []

    def __call__(self, trainer: pl.Trainer) -> None:
        self.withdraw()
        for action in self.actions:
            action()
        self.strategy.setup(trainer)

    def __reduce__(self) -> tuple[Any, ...]:
        """In a copy of the strategy, such as a worker process gets of the trainer, there is nothing to do."""
        return pass_on, (MethodType(type(self.strategy).setup, self.strategy),)

    def withdraw(self) -> None:
        if vars(self.strategy).get("setup") is self:
            del vars(self.strategy)["setup"]


def before_strategy_setup(trainer: pl.Trainer, action: Action) -> None:
    """Run ``action`` right before the coming ``trainer.strategy.setup``, once. Actions run in order of registration.

    Args:
        trainer: A trainer that is in its ``setup`` hooks.
        action: What to do with ``trainer.lightning_module``. If it raises, the run ends there.
    """
    shadow = vars(trainer.strategy).get("setup")
    if not isinstance(shadow, _BeforeStrategySetup):
        shadow = _BeforeStrategySetup(trainer.strategy)
        trainer.strategy.setup = shadow  # type: ignore[method-assign]
    shadow.actions.append(action)


def withdraw_from_strategy_setup(trainer: pl.Trainer) -> None:
    """Forget all actions: for a run that ended before its strategy was set up."""
    shadow = vars(trainer.strategy).get("setup")
    if isinstance(shadow, _BeforeStrategySetup):
        shadow.withdraw()
