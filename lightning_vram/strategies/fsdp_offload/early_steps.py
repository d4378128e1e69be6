"""When an optimizer may step in the backward: nobody may look at gradients, or change them, after it."""

from collections.abc import Iterator

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_vram.callbacks.accumulation_scheduler import AccumulationScheduler
from lightning_vram.callbacks.micro_batching import MicroBatching
from lightning_vram.callbacks.vram_monitor import VRAMMonitor
from lightning_vram.precision import LeanMixedPrecision

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
    if isinstance(callback, AccumulationScheduler | MicroBatching):
        yield type(callback).__name__  # they change gradients, or run a backward again
    elif not isinstance(callback, VRAMMonitor) and not type(callback).__module__.startswith("lightning."):
        yield from (hook for hook in _HOOKS if is_overridden(hook, callback, parent=pl.Callback))


def _is_scaled(trainer: pl.Trainer) -> bool:
    """Whether gradients are scaled, so that a step may be left out."""
    precision = trainer.precision_plugin
    return isinstance(precision, LeanMixedPrecision) and precision.scaler is not None
