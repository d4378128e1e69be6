"""When an optimizer may step in the backward."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_vram.callbacks.hook_points import is_scaled, why_not_early
from lightning_vram.private_names.lightning.logging import runs_in_hook


class EarlySteps:
    """Decides whether no code reads or changes gradients after the backward; reports the first reason otherwise."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer, self._has_told = trainer, False

    def __call__(self, closure: Callable[[], Any]) -> bool:
        """Whether a step may begin in its ``closure``."""
        why = self._why_late(closure)
        if why is not None and not self._has_told:
            self._has_told = True
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
