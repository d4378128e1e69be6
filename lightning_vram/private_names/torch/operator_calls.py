"""Operators that are called from a dispatch mode, as they run without one."""

from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from torch import Tensor

from lightning_vram.private_names.torch.dispatch import DispatchKey
from lightning_vram.private_names.torch.operators import OpOverload
from lightning_vram.private_names.torch.trees import tree_leaves

_NAMES = ("_trilinear", "_sparse_addmm", "_native_multi_head_attention", "_transformer_encoder_layer_fwd")
_CASTING = frozenset(getattr(torch.ops.aten, name).default for name in _NAMES if hasattr(torch.ops.aten, name))
_NAMESPACES = frozenset({"aten", "prim", "prims", "profiler", "c10d", "_c10d_functional", "inductor", "higher_order"})
_AUTOCAST_KEYS = [key for name, key in DispatchKey.__members__.items() if name.startswith("Autocast")]


def call_operator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
    """Call an operator from ``__torch_dispatch__`` of a mode."""
    if not _may_cast_inside(func):
        return func(*args, **kwargs) if kwargs else func(*args)
    with ExitStack() as stack:
        for device_type, dtype in _autocast_of_caller(args, kwargs).items():
            stack.enter_context(torch.autocast(device_type, dtype))
        return func(*args, **(kwargs or {}))


@cache
def _may_cast_inside(func: Any) -> bool:
    if func in _CASTING:
        return True
    if not isinstance(func, OpOverload) or func.namespace in _NAMESPACES:
        return False
    return not any(map(func.has_kernel_for_dispatch_key, _AUTOCAST_KEYS))  # those run with autocast off


def _autocast_of_caller(args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> dict[str, torch.dtype]:
    """Return the devices of the arguments for which autocast was on where the operator was called, and to what."""
    devices = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)} - {"meta"}
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        return {device: torch.get_autocast_dtype(device) for device in devices if torch.is_autocast_enabled(device)}
