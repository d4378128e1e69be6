"""What a step in the backward cannot work with, each with the way out."""

from collections.abc import Callable

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from lightning_vram.callbacks.hook_points import (
    is_scaled,
    own_gradient_hooks,
    refuse_moved_parameters,
    uses_gradients,
)
from lightning_vram.core.gradients.reduction import why_reducer_is_needed

NAME = "OptimizerInBackward"
_NEEDS_ALL = (
    "OptimizerInBackward(keep_gradients=False) does not work with {}, which needs the gradients of all micro-batches "
    "at once: use {}, or keep_gradients=True."
)


def check_run(trainer: pl.Trainer, max_norm: str | None, *, keep_gradients: bool) -> None:
    """Refuse what cannot work, in the ``setup`` hooks, before anything has changed."""
    refuse_moved_parameters(NAME, trainer, "it steps")
    if hasattr(trainer.strategy, "moments"):  # of fsdp_offload
        raise MisconfigurationException(
            f"{NAME} does not work with {type(trainer.strategy).__name__}, which steps itself as gradients become "
            f"ready: leave {NAME} out."
        )
    if not trainer.lightning_module.automatic_optimization:
        raise MisconfigurationException(
            f"{NAME} does not work with manual optimization: it cannot see which backward belongs to which step. Set "
            "automatic_optimization=True."
        )
    _check_hooks(trainer)
    if not keep_gradients:
        _check_accumulation(trainer)
    _check_clipping(trainer, max_norm)


def clips_by_norm(trainer: pl.Trainer) -> bool:
    """Whether the Trainer clips gradients by their common norm."""
    return bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != GradClipAlgorithmType.VALUE


def check_training(trainer: pl.Trainer, max_norm: str | None, *, keep_gradients: bool) -> None:
    """Refuse what shows only once the module is wrapped: a scaler, and what only DDP's reducer can do."""
    if is_scaled(trainer) and not keep_gradients:
        raise MisconfigurationException(_NEEDS_ALL.format("a GradScaler", "precision='bf16-mixed'"))
    if is_scaled(trainer) and max_norm != "two-pass":
        raise MisconfigurationException(
            f"{NAME}(max_norm={max_norm!r}) does not work with a GradScaler, which checks all gradients before any "
            "step: use max_norm='two-pass' (exact; runs each backward twice) or "
            "precision='bf16-mixed'."
        )
    if is_scaled(trainer) and isinstance(trainer.strategy, ModelParallelStrategy):
        raise MisconfigurationException(
            f"{NAME} does not work with a GradScaler under {type(trainer.strategy).__name__}: use "
            "precision='bf16-mixed', 'ddp' or a single device."
        )
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return
    reason = "find_unused_parameters=True" if model.find_unused_parameters else why_reducer_is_needed(model)
    if reason is not None:
        raise MisconfigurationException(
            f"{NAME} does not work with {reason}: it steps when DDP has reduced a bucket. Use strategy='ddp' without "
            "that option."
        )


def leaves_zeros(zero: Callable[[], None], optimizer: Optimizer) -> bool:
    """Zero gradients, among them a probe; return whether it became zeros rather than ``None``, refuse if it stays."""
    parameters = (one for group in optimizer.param_groups for one in group["params"])
    free = (one for one in parameters if one.requires_grad and one.grad is None)
    probe = min(free, key=torch.numel, default=None)
    if probe is None:
        zero()
        return False
    probe.grad = torch.ones_like(probe)
    zero()
    left, probe.grad = probe.grad, None
    if left is not None and bool(left.any()):
        raise MisconfigurationException(
            f"{NAME} does not work with an optimizer_zero_grad that leaves gradients: they are used up by then. Call "
            f"optimizer.zero_grad() in there, or leave {NAME} out."
        )
    return left is not None


def _check_accumulation(trainer: pl.Trainer) -> None:
    if trainer.gradient_clip_val:
        raise MisconfigurationException(_NEEDS_ALL.format("gradient_clip_val", "no clipping"))
    user = next((type(one).__name__ for one in trainer.callbacks if uses_gradients(one)), None)  # type: ignore[attr-defined]
    if user is not None:
        raise MisconfigurationException(_NEEDS_ALL.format(user, f"no {user}"))
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        raise MisconfigurationException(_NEEDS_ALL.format(type(trainer.strategy).__name__, "a single device"))


def _check_hooks(trainer: pl.Trainer) -> None:
    module = trainer.lightning_module
    for owner in (module, *trainer.callbacks):  # type: ignore[attr-defined]
        hook, name = next(own_gradient_hooks(owner), None), type(owner).__name__
        if hook is not None:
            way_out = (
                "Remove it" if owner is module else f"Set uses_gradients = False in {name} if it leaves them alone"
            )
            raise MisconfigurationException(
                f"{NAME} does not work with {name}.{hook}, which may use gradients: they are used up by then. "
                f"{way_out}, or leave {NAME} out."
            )


def _check_clipping(trainer: pl.Trainer, max_norm: str | None) -> None:
    if not clips_by_norm(trainer):
        return
    if max_norm is None:
        raise MisconfigurationException(
            f"{NAME} cannot clip by norm, which needs all gradients at once, got gradient_clip_val="
            f"{trainer.gradient_clip_val}: use max_norm='two-pass' (exact; runs each backward twice), "
            "max_norm='previous' (by the norm of the step before) or gradient_clip_algorithm='value'."
        )
