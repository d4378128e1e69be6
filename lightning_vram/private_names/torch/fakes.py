"""Tensors that only pretend, and the devices they pretend to lie on."""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
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
_FIRST_NAME = 1_000_000  # groups are numbered, and operators know them by their numbers
_NO_THREAD = -1


def connect_fake_ranks(kinds: Iterable[str], num_ranks: int) -> None:
    """Make the default process group one of ranks that are not there. This process is rank 0."""
    from torch.distributed._tools import fake_collectives  # noqa: F401 - registers operators
    from torch.testing._internal.distributed.fake_pg import FakeStore

    backend = ",".join(f"{kind}:{BACKEND}" for kind in kinds)
    dist.init_process_group(backend, store=FakeStore(), rank=0, world_size=num_ranks)
    group: Any = dist.group.WORLD
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)  # else its end is warned of


@contextmanager
def disconnected() -> Iterator[None]:
    """Disconnect this process from all others inside the block; its process groups return afterwards."""
    if not dist.is_available():
        yield
        return
    from torch.distributed import distributed_c10d as c10d

    before = c10d._world
    c10d._world = _make_world(c10d)
    try:
        with _own_meshes():
            yield
    finally:
        c10d._world = before
        c10d._update_default_pg(before.default_pg)
        for group, name in before.pg_names.items():
            _register(name, group)


@contextmanager
def _own_meshes() -> Iterator[None]:
    """Let no mesh that is made inside be equal to one outside: DTensor remembers by meshes what it has done."""
    from torch.distributed.device_mesh import DeviceMesh

    make = DeviceMesh.__init__

    def make_apart(mesh: DeviceMesh, *args: Any, **kwargs: Any) -> None:
        make(mesh, *args, **kwargs)
        mesh._thread_id = _NO_THREAD

    DeviceMesh.__init__ = make_apart  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        DeviceMesh.__init__ = make  # type: ignore[method-assign]


def _make_world(c10d: Any) -> Any:
    names = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")
    own = type("World", (c10d._World,), dict.fromkeys((*names, "group_count")))()  # else they are the module's
    vars(own).update({name: {} for name in names}, group_count=_FIRST_NAME)
    return own


def _register(name: str, group: Any) -> None:
    registry: Any = torch._C._distributed_c10d
    try:
        registry._resolve_process_group(name)
    except (LookupError, RuntimeError, ValueError):  # closing a group forgets those of everybody
        registry._register_process_group(name, group)
