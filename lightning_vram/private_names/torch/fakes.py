"""Tensors that only pretend, and the devices they pretend to lie on."""

import sys
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

__all__ = ["DataDependentOutputException", "DynamicOutputShapeException", "UnsupportedOperatorException"]

UNKNOWN_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)
RECURRENT_FUNCTIONS: Any = torch._VF
GROUPED_MM = torch.ops.aten._grouped_mm.default


def set_device_module(kind: str, module: ModuleType) -> None:
    """Let ``module`` be ``torch.KIND``."""
    torch._register_device_module(kind, module)  # type: ignore[no-untyped-call]
    _forget_modules()


def remove_device_module(kind: str) -> None:
    """Take it back."""
    delattr(torch, kind)
    sys.modules.pop(f"torch.{kind}", None)
    _forget_modules()


def _forget_modules() -> None:
    """``torch.get_device_module`` remembers for ever what it has found."""
    forget = getattr(torch.get_device_module, "cache_clear", None)
    if forget is not None:
        forget()


def mark_parameter(tensor: Any) -> None:
    """Let a tensor of a subclass be a parameter."""
    tensor._is_param = True


def swap_contents(first: Tensor, second: Tensor) -> None:
    """Let two tensors be what the other is.

    Unlike ``torch.utils.swap_tensors`` it takes no notice of who knows them: the mode knows all fakes by weak
    references, and graphs of steps that are over may be left.
    """
    torch._C._swap_tensor_impl(first, second)
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    for tensor in (first, second):
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):  # what knows them in C++ was swapped
            if getattr(tensor, name) is not None:
                setattr(tensor, name, getattr(tensor, name))


BACKEND = "fake"


def connect_fake_ranks(kinds: Iterable[str], num_ranks: int) -> None:
    """Make the default process group one of ranks that are not there. This process is rank 0."""
    from torch.distributed._tools import fake_collectives  # noqa: F401 - registers operators
    from torch.testing._internal.distributed.fake_pg import FakeStore

    backend = ",".join(f"{kind}:{BACKEND}" for kind in kinds)
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=num_ranks)
    group: Any = dist.group.WORLD
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)  # else its end is warned of
