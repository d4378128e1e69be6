"""Patches of Lightning for sharded parameters, and when steps may be early."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_vram.callbacks.hook_points import is_scaled, why_not_early
from lightning_vram.core.gradients import clip_sharded_values
from lightning_vram.core.patching import MethodPatch, replace_by
from lightning_vram.optimizers.on_host import HostOptimizers
from lightning_vram.optimizers.step_round import iterate_parameters
from lightning_vram.private_names.lightning import runs_in_hook
from lightning_vram.techniques.sharding import FullSharding


def patch_trainer(trainer: pl.Trainer, optimizers: HostOptimizers, sharding: FullSharding) -> list[MethodPatch]:
    """Make clipping, ``toggle_optimizer`` and ``log`` work on shards; steps are early where nothing reads gradients."""
    module, precision = trainer.lightning_module, trainer.precision_plugin
    optimizers.may_step_early = EarlySteps(trainer)

    # for any plugin, on the local gradients: the dispatch of DTensor takes longer than the arithmetic
    def clip_norm(optimizer: Optimizer, clip_val: float) -> None:
        optimizers.clip_norm(optimizer, clip_val, may_wait=may_clip_late(trainer))

    def clip_value(optimizer: Optimizer, clip_val: float) -> None:
        clip_sharded_values(iterate_parameters(optimizer), clip_val)

    def follow(toggle: Callable[..., None]) -> Callable[..., None]:
        def toggle_gathered(*args: Any, **kwargs: Any) -> None:
            toggle(*args, **kwargs)
            sharding.agree_on_gradients()

        return toggle_gathered

    def take_numbers(log: Callable[..., None]) -> Callable[..., None]:
        def log_number(name: str, value: Any, *args: Any, **kwargs: Any) -> None:  # it could not add up sharded tensors
            log(name, value.item() if isinstance(value, DTensor) else value, *args, **kwargs)

        return log_number

    return [
        MethodPatch(precision, "clip_grad_by_norm", replace_by(clip_norm)),
        MethodPatch(precision, "clip_grad_by_value", replace_by(clip_value)),
        MethodPatch(module, "toggle_optimizer", follow),
        MethodPatch(module, "untoggle_optimizer", follow),
        MethodPatch(module, "log", take_numbers),
    ]


class EarlySteps:
    """Decides whether no code reads or changes gradients after the backward; reports the first reason otherwise."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer, self._has_logged = trainer, False

    def __call__(self, closure: Callable[[], Any]) -> bool:
        """Whether a step may begin in its ``closure``."""
        why = self._why_late(closure)
        if why is not None and not self._has_logged:
            self._has_logged = True
            rank_zero_info(
                "fsdp_offload steps the optimizer after the backward instead of layer by layer within it, because of "
                f"{why}: the step overlaps only with the next forward."
            )
        return why is None

    def _why_late(self, closure: Callable[[], Any]) -> str | None:
        trainer = self._trainer
        if not trainer.lightning_module.automatic_optimization:
            return "manual optimization"
        if trainer.gradient_clip_val:
            return f"gradient_clip_val={trainer.gradient_clip_val}"
        if is_scaled(trainer):
            return "the GradScaler"
        return "detect_anomaly" if torch.is_anomaly_enabled() else why_not_early(trainer, closure)


def may_clip_late(trainer: pl.Trainer) -> bool:
    """Whether no code reads gradients between the current clipping and the step."""
    module = trainer.lightning_module
    name = "configure_gradient_clipping"  # in another hook the module may use gradients afterwards
    return (
        module.automatic_optimization
        and runs_in_hook(module, name)
        and not (is_overridden(name, module) or is_scaled(trainer))
    )
