"""What reads or changes gradients between a backward and its step."""

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_vram.private_names.lightning.loops import is_loops_closure

_HOOKS = ("on_after_backward", "on_before_optimizer_step")
_HOOKS_OF_MODULE = (*_HOOKS, "configure_gradient_clipping", "backward")


def own_gradient_hooks(owner: pl.LightningModule | pl.Callback) -> Iterator[str]:
    """Name the hooks that may use gradients, of a module or of a callback without the attribute ``uses_gradients``."""
    is_module = isinstance(owner, pl.LightningModule)
    if is_module or not hasattr(owner, "uses_gradients"):
        own = (hook for hook in (_HOOKS_OF_MODULE if is_module else _HOOKS) if is_overridden(hook, owner))
        # A LambdaCallback is Lightning's, its hooks are not.
        yield from (hook for hook in own if not getattr(owner, hook).__module__.startswith("lightning."))


def uses_gradients(callback: pl.Callback) -> bool:
    """Whether a callback uses gradients: by its attribute ``uses_gradients``, else by its hooks."""
    return bool(getattr(callback, "uses_gradients", any(own_gradient_hooks(callback))))


def gradient_users(trainer: pl.Trainer) -> Iterator[str]:
    """Name what may use gradients after a backward: hooks of the module, callbacks, and a precision plugin."""
    yield from (f"the module's {hook}" for hook in own_gradient_hooks(trainer.lightning_module))
    yield from (type(one).__name__ for one in trainer.callbacks if uses_gradients(one))  # type: ignore[attr-defined]
    plugin = type(trainer.precision_plugin)
    yield from [] if plugin.__module__.startswith(("lightning.", "lightning_vram.")) else [plugin.__name__]


def why_not_early(trainer: pl.Trainer, closure: Callable[[], Any] | None) -> str | None:
    """Name what may use gradients between the backward in a closure and the step; ``None`` if nothing does.

    ``closure`` is what the optimizer gets; with a ``GradScaler``, what the precision plugin gets, which calls it.
    """
    user = next(gradient_users(trainer), None)
    if user is None and not is_loops_closure(closure, is_bare=is_scaled(trainer)):
        is_modules = is_overridden("optimizer_step", trainer.lightning_module)
        return "the module's optimizer_step" if is_modules else "a wrapper of the optimizer's closure"
    return user


def is_scaled(trainer: pl.Trainer) -> bool:
    """Whether gradients are scaled, so that a step may be skipped."""
    return getattr(trainer.precision_plugin, "scaler", None) is not None
