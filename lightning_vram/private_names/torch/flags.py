"""Settings of the process that decide what operators and parametrizations compute.

* ``torch._C._get_flash_sdp_enabled``, ``torch._C._set_sdp_use_flash``, ``torch._C._get_math_sdp_enabled``,
  ``torch._C._set_sdp_use_math``, ``torch._C._get_mem_efficient_sdp_enabled``,
  ``torch._C._set_sdp_use_mem_efficient``, ``torch._C._get_cudnn_sdp_enabled``, ``torch._C._set_sdp_use_cudnn``,
  ``torch._C._get_overrideable_sdp_enabled``, ``torch._C._set_sdp_use_overrideable``,
  ``torch._C._get_sdp_priority_order``, ``torch._C._set_sdp_priority_order``: what ``sdpa_kernel`` sets | 2.11 - |
  recomputation fails
* ``torch._C._get_cudnn_enabled``, ``torch._C._set_cudnn_enabled``, ``torch._C._get_cudnn_deterministic``,
  ``torch._C._set_cudnn_deterministic``, ``torch._C._get_cudnn_benchmark``, ``torch._C._set_cudnn_benchmark``,
  ``torch._C._get_mkldnn_enabled``, ``torch._C._set_mkldnn_enabled``: what the ``flags`` of ``torch.backends`` set |
  2.11 - | recomputation fails
* ``torch.nn.utils.parametrize._cache_enabled``: how many ``parametrize.cached()`` are entered | 2.11 - | recomputation
  fails
* ``torch.nn.utils.parametrize._cache``: the tensors that they share | 2.11 - | as without ``_cache_enabled``
"""

from typing import Any

import torch
from torch.nn.utils import parametrize

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
