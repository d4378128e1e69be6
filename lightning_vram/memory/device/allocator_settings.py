"""Let CUDA's caching allocator grow its segments, so that memory freed in one size serves another."""

import os
import sys
from collections.abc import MutableMapping

import torch

from lightning_vram.memory.units import MIB, format_bytes

# Read when CUDA's allocator is used first, whatever was imported before.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # torch 2.9.1 did not read the first, which is the newer
_OTHER_VARIABLES = ("PYTORCH_HIP_ALLOC_CONF",)  # of a ROCm build
SETTING = "expandable_segments:True"
_WORTH_SAYING = 1.1, 256 * MIB  # reserved of allocated, and beyond it


def configure_allocator(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Enable expandable segments of CUDA's caching allocator, to avoid fragmentation.

    Use it if reserved memory is much larger than allocated memory. It sets the environment of this process and of those
    that it starts. Call it before the first tensor is on the GPU; ``lightning-vram fit`` does. A setting of your own
    wins: export ``PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False`` for programs that share CUDA tensors between
    processes, or whose CUDA graphs do not work with expandable segments. Without CUDA, on ROCm and under ``win32`` it
    does nothing.

    Args:
        environment: Mapping that receives the setting.

    Returns:
        Whether expandable segments are enabled: ``False`` if you have set something else, or they are not available.

    Raises:
        RuntimeError: If CUDA's allocator is already in use and has read its settings.

    Example:
        >>> configure_allocator({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128"})
        False
    """
    if expands(environment):
        return True
    has_own = any(environment.get(name) for name in (*VARIABLES, *_OTHER_VARIABLES))
    if has_own or sys.platform == "win32" or torch.version.cuda is None:
        return False
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise RuntimeError(
            "configure_allocator() came too late: CUDA has already read its settings. Call it before the first tensor "
            f"is on the GPU, or start the program with {VARIABLES[1]}={SETTING}."
        )
    environment.update(dict.fromkeys(VARIABLES, SETTING))
    return True


def expands(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Whether the environment asks for expandable segments."""
    return any(SETTING in environment.get(name, "").replace(" ", "") for name in (*VARIABLES, *_OTHER_VARIABLES))


def advise(allocated_bytes: int, reserved_bytes: int) -> str | None:
    """Warn of a run that reserved (peak bytes) much more than it ever allocated (peak bytes); ``None``: no warning."""
    ratio, beyond_bytes = _WORTH_SAYING
    is_little = reserved_bytes <= ratio * allocated_bytes or reserved_bytes - allocated_bytes < beyond_bytes
    if is_little or torch.version.cuda is None or expands():
        return None
    return (
        f"{format_bytes(reserved_bytes)} were reserved, but at most {format_bytes(allocated_bytes)} allocated: "
        "fragmentation. Call lightning_vram.configure_allocator() first in the program, or start it with "
        f"{VARIABLES[1]}={SETTING}."
    )
