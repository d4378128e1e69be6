"""Who looks at gradients, or changes them, between a backward and its step.

A callback says by an attribute ``uses_gradients`` whether it does; of one that does not say it, the hooks that it has
tell.
"""

from collections.abc import Iterator

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

HOOKS = ("on_after_backward", "on_before_optimizer_step")


def own_gradient_hooks(callback: pl.Callback) -> Iterator[str]:
    """Name the hooks of a callback that may use gradients, unless it says whether they do."""
    is_lightnings = type(callback).__module__.startswith("lightning.")
    if not hasattr(callback, "uses_gradients") and not is_lightnings:
        yield from (hook for hook in HOOKS if is_overridden(hook, callback, parent=pl.Callback))


def uses_gradients(callback: pl.Callback) -> bool:
    """Whether a callback uses gradients, as far as one can know."""
    return bool(getattr(callback, "uses_gradients", any(own_gradient_hooks(callback))))


def is_scaled(trainer: pl.Trainer) -> bool:
    """Whether gradients are scaled, so that a step may be left out."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None
