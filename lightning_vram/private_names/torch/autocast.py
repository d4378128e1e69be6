"""Autocast, and what ``GradScaler`` keeps for itself.

* ``torch._C._DisableAutocast``: run without autocast, as a backward does | 2.11 - | recomputation and compression fail
* ``torch.autocast._enabled``: whether a device can autocast to a format | 2.11 - | precision cannot be chosen
* ``torch.amp.grad_scaler.GradScaler._scale``: the scale on its device | 2.11 - | gradients are taken for not scaled
* ``torch.amp.grad_scaler.GradScaler._device``: where the scale is | 2.11 - | loss scaling fails
* ``torch.amp.grad_scaler.GradScaler._per_optimizer_states``: what was found in gradients | 2.11 - | loss scaling fails
* ``torch.amp.grad_scaler._refresh_per_optimizer_state``: what there is before | 2.11 - | loss scaling fails
* ``torch.amp.GradScaler._maybe_opt_step``: steps if all gradients are finite | 2.11 - | fp16 cannot be estimated
* ``torch.amp.grad_scaler.GradScaler._init_scale``: the first scale | 2.11 - | programs that ask for it cannot be
  estimated
* ``torch._C._is_autocast_available``: whether a kind of device can autocast | 2.11 - | nothing is estimated
* ``torch.amp.autocast_mode._cast``: casts what ``custom_fwd`` gets | 2.11 - | its casts are missing in estimates
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, _refresh_per_optimizer_state

OptimizerStates = dict[int, dict[str, Any]]
"""What a scaler knows of each optimizer, by id."""

AVAILABILITY = (torch._C, "_is_autocast_available")
"""Where the function is that tells whether a kind of device can autocast."""
CAST_ARGUMENTS = (torch.amp.autocast_mode, "_cast")
"""Where the function is that casts the arguments of ``custom_fwd``: of a nest, a kind of device and a dtype."""
STEP_IF_FINITE = "_maybe_opt_step"
"""The method of ``GradScaler`` that steps an optimizer if it found no infinite gradient."""

without_autocast: Any = torch._C._DisableAutocast
"""Make a context without autocast for any device."""


def can_autocast(device_type: str, dtype: torch.dtype) -> bool:
    """Whether there is autocast to ``dtype``; torch warns if not.

    Raises:
        RuntimeError: If the device knows nothing of autocast.
    """
    return bool(torch.autocast(device_type, dtype=dtype)._enabled)


def scale_of(scaler: GradScaler) -> Tensor | None:
    """Return the scale; ``None`` before the first loss, and if ``scaler`` is disabled."""
    return getattr(scaler, "_scale", None)


def first_scale_of(scaler: GradScaler) -> float:
    """Return the scale of the first loss; 1 if ``scaler`` is disabled."""
    return scaler._init_scale if scaler.is_enabled() else 1.0


def set_scale(scaler: GradScaler, scale: Tensor | None) -> None:
    """Let ``scaler`` have this scale, on the device where it is."""
    scaler._scale = scale


def device_of(scaler: GradScaler) -> str:
    """Return the device type for the scale."""
    return scaler._device


def optimizer_states(scaler: GradScaler) -> OptimizerStates:
    """Return what ``scaler`` knows of each optimizer: the very dictionary."""
    return scaler._per_optimizer_states


def set_optimizer_states(scaler: GradScaler, states: OptimizerStates) -> None:
    """Let ``scaler`` know this of the optimizers."""
    scaler._per_optimizer_states = states


def no_optimizer_states() -> OptimizerStates:
    """Return what a new scaler knows."""
    return defaultdict(_refresh_per_optimizer_state)
