"""When an optimizer may step in the backward: nobody may look at gradients, or change them, after it."""

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_vram.callbacks.hook_points import HOOKS, is_scaled, uses_gradients


def may_step_early(trainer: pl.Trainer) -> bool:
    """Whether the gradients of a layer are those to step with as soon as the backward has them."""
    module = trainer.lightning_module
    is_clipping = trainer.gradient_clip_val or is_overridden("configure_gradient_clipping", module)
    return (
        module.automatic_optimization
        and not (is_clipping or is_scaled(trainer) or torch.is_anomaly_enabled())
        and not any(is_overridden(hook, module) for hook in HOOKS)
        and not any(map(uses_gradients, trainer.callbacks))  # type: ignore[attr-defined]
    )


def may_clip_late(trainer: pl.Trainer) -> bool:
    """Whether nobody looks at gradients between clipping and the step."""
    module = trainer.lightning_module
    is_own = is_overridden("configure_gradient_clipping", module)
    return module.automatic_optimization and not is_own and not is_scaled(trainer)
