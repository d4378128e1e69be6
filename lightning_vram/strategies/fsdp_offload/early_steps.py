"""When an optimizer may step in the backward: nobody may look at gradients, or change them, after it.

A callback says by an attribute ``uses_gradients`` whether it does; of one that does not say it, the hooks that it has
tell.
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

_HOOKS = ("on_after_backward", "on_before_optimizer_step")


def may_step_early(trainer: pl.Trainer) -> bool:
    """Whether the gradients of a layer are those to step with as soon as the backward has them."""
    module = trainer.lightning_module
    is_clipping = trainer.gradient_clip_val or is_overridden("configure_gradient_clipping", module)
    return (
        module.automatic_optimization
        and not (is_clipping or _is_scaled(trainer) or torch.is_anomaly_enabled())
        and not any(is_overridden(hook, module) for hook in _HOOKS)
        and not any(map(_uses_gradients, trainer.callbacks))  # type: ignore[attr-defined]
    )


def may_clip_late(trainer: pl.Trainer) -> bool:
    """Whether nobody looks at gradients between clipping and the step."""
    module = trainer.lightning_module
    is_own = is_overridden("configure_gradient_clipping", module)
    return module.automatic_optimization and not is_own and not _is_scaled(trainer)


def _uses_gradients(callback: pl.Callback) -> bool:
    if hasattr(callback, "uses_gradients"):
        return bool(callback.uses_gradients)
    is_lightnings = type(callback).__module__.startswith("lightning.")
    return not is_lightnings and any(is_overridden(hook, callback, parent=pl.Callback) for hook in _HOOKS)


def _is_scaled(trainer: pl.Trainer) -> bool:
    """Whether gradients are scaled, so that a step may be left out."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None
