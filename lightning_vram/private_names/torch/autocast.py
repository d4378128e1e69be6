"""Autocast, other settings that decide what operators compute, and what ``GradScaler`` keeps for itself."""

from collections import defaultdict
from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler, _refresh_per_optimizer_state
from torch.nn.utils import parametrize

OptimizerStates = dict[int, dict[str, Any]]
"""What a scaler knows of each optimizer, by id."""

AVAILABILITY = (torch._C, "_is_autocast_available")
"""Where the function is that checks whether a kind of device can autocast."""
CAST_ARGUMENTS = (torch.amp.autocast_mode, "_cast")
"""Where the function is that casts the arguments of ``custom_fwd``: of a nest, a kind of device and a dtype."""
STEP_IF_FINITE = "_maybe_opt_step"
"""The method of ``GradScaler`` that steps an optimizer if it found no infinite gradient."""

without_autocast: Any = torch._C._DisableAutocast
"""Make a context without autocast for any device."""


def can_autocast(device_type: str, dtype: torch.dtype) -> bool:
    """Whether there is autocast to ``dtype``; torch warns if not. ``RuntimeError``: a device without autocast."""
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


device_of: Callable[[GradScaler], str] = attrgetter("_device")
"""Return the device type for the scale."""
optimizer_states: Callable[[GradScaler], OptimizerStates] = attrgetter("_per_optimizer_states")
"""Return what a scaler knows of each optimizer: the very dictionary."""


def set_optimizer_states(scaler: GradScaler, states: OptimizerStates) -> None:
    """Let ``scaler`` know this of the optimizers."""
    scaler._per_optimizer_states = states


def no_optimizer_states() -> OptimizerStates:
    """Return what a new scaler knows."""
    return defaultdict(_refresh_per_optimizer_state)


_FLAGS: list[tuple[Any, Any]] = [  # how to read each, and how to write it
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch._C._get_overrideable_sdp_enabled, torch._C._set_sdp_use_overrideable),
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    (torch._C._get_cudnn_enabled, torch._C._set_cudnn_enabled),
    (torch._C._get_cudnn_deterministic, torch._C._set_cudnn_deterministic),
    (torch._C._get_cudnn_benchmark, torch._C._set_cudnn_benchmark),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
]


def read_flags() -> list[Any]:
    """Return all settings: the default dtype, backends of attention, cuDNN and oneDNN, deterministic algorithms."""
    return [read() for read, _ in _FLAGS]


def write_flags(values: list[Any]) -> None:
    """Set what :func:`read_flags` returned, where it differs from now."""
    for (read, write), value in zip(_FLAGS, values, strict=True):
        if read() != value:
            write(value)


def read_parametrizations() -> tuple[int, dict[Any, Any]] | None:
    """Return how many ``parametrize.cached()`` are entered and what they have computed; ``None`` if there are none."""
    return (parametrize._cache_enabled, dict(parametrize._cache)) if parametrize._cache_enabled else None


def write_parametrizations(state: tuple[int, dict[Any, Any]] | None) -> None:
    """Set what :func:`read_parametrizations` returned."""
    parametrize._cache_enabled, cached = state or (0, {})
    parametrize._cache.clear()
    parametrize._cache.update(cached)
