"""Where our callbacks act in Lightning's run, and what they ask of it. May import: optimizers, core, memory.

``before_strategy_setup`` changes a module before it is wrapped, ``AroundStep`` enters a context around each step,
``FitTechnique`` is a callback that does both and undoes it.
"""

from lightning_vram.callbacks.hook_points.around_step import AroundStep, Depth
from lightning_vram.callbacks.hook_points.before_strategy_setup import (
    before_strategy_setup,
    withdraw_from_strategy_setup,
)
from lightning_vram.callbacks.hook_points.checks import check_trainer, refuse_moved_parameters
from lightning_vram.callbacks.hook_points.fit_technique import FitTechnique
from lightning_vram.callbacks.hook_points.gradient_hooks import (
    gradient_users,
    is_scaled,
    own_gradient_hooks,
    uses_gradients,
    why_not_early,
)
from lightning_vram.callbacks.hook_points.moments_technique import MomentsTechnique
from lightning_vram.callbacks.hook_points.rank_timeout import rank_timeout
from lightning_vram.callbacks.hook_points.relief import Relief

__all__ = [
    "AroundStep",
    "Depth",
    "FitTechnique",
    "MomentsTechnique",
    "Relief",
    "before_strategy_setup",
    "check_trainer",
    "gradient_users",
    "is_scaled",
    "own_gradient_hooks",
    "rank_timeout",
    "refuse_moved_parameters",
    "uses_gradients",
    "why_not_early",
    "withdraw_from_strategy_setup",
]
