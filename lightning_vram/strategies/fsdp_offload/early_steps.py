"""When an optimizer may step in the backward: nobody may look at gradients, or change them, after it.

A callback says by an attribute ``uses_gradients`` whether it does; of one that does not say it, the hooks that it has
tell.
"""

from collections.abc import Iterator

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

_HOOKS = ("on_after_backward", "on_before_optimizer_step")


def may_step_early(trainer: pl.Trainer) -> bool:
    """Whether the gradients of a layer are those to step with as soon as the backward has them."""
    return next(_obstacles(trainer), None) is None


def may_clip_late(trainer: pl.Trainer) -> bool:
    """Whether nobody looks at gradients between clipping and the step."""
    module = trainer.lightning_module
    is_own = is_overridden("configure_gradient_clipping", module)
    return module.automatic_optimization and not is_own and not _is_scaled(trainer)


def _obstacles(trainer: pl.Trainer) -> Iterator[str]:
    module = trainer.lightning_module
    if not module.automatic_optimization:
        yield "manual optimization"
    if trainer.gradient_clip_val or is_overridden("configure_gradient_clipping", module):
        yield "clipping"
    if _is_scaled(trainer):
        yield "scaled gradients"
    if torch.is_anomaly_enabled():
        yield "detect_anomaly"
    yield from (hook for hook in _HOOKS if is_overridden(hook, module))
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        yield from _obstacles_in(callback)


def _obstacles_in(callback: pl.Callback) -> Iterator[str]:
    uses_gradients = getattr(callback, "uses_gradients", None)
    if uses_gradients:
        yield type(callback).__name__
    elif uses_gradients is None and not type(callback).__module__.startswith("lightning."):
        yield from (hook for hook in _HOOKS if is_overridden(hook, callback, parent=pl.Callback))


def _is_scaled(trainer: pl.Trainer) -> bool:
    """Whether gradients are scaled, so that a step may be left out."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None
