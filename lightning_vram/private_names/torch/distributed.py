"""``DistributedDataParallel`` by itself, and what this process knows of other processes."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

_FIRST_NAME = 1_000_000  # groups are numbered, and operators know them by their numbers
_NO_THREAD = -1


def delays_reductions(ddp: DistributedDataParallel) -> bool:
    """Whether ``ddp`` reduces some parameters late."""
    return bool(getattr(ddp, "_delay_all_reduce_params", ()))


def is_reduced_by_compiler(ddp: DistributedDataParallel) -> bool:
    """Whether the reducer of compiled autograd is in place of that of ``ddp``."""
    return bool(getattr(ddp, "_use_python_reducer", False))


def has_optimizer_in_backward(parameters: Iterable[Tensor]) -> bool:
    """Whether an optimizer was put into the backward of one of ``parameters``."""
    return any(hasattr(parameter, "_in_backward_optimizers") for parameter in parameters)


def logged_by(ddp: DistributedDataParallel) -> dict[str, Any]:
    """Return what ``ddp`` logs of itself: the only place that knows hooks which are built in."""
    read = getattr(ddp, "_get_ddp_logging_data", dict)
    logged: dict[str, Any] = read()
    return logged


def can_sync_buffers(ddp: DistributedDataParallel) -> bool:
    """Whether :func:`sync_buffers` works for ``ddp``."""
    return getattr(ddp, "_sync_buffers", None) is not None


def sync_buffers(ddp: DistributedDataParallel) -> None:
    """Broadcast the buffers from rank 0. A collective: ``RuntimeError`` if the backend fails."""
    ddp._sync_buffers()  # type: ignore[no-untyped-call]


def drop_reduced_gradients(ddp: DistributedDataParallel) -> None:
    """Let ``ddp`` leave every ``grad`` empty after a backward: a communication hook has used what was reduced."""
    reducer: Any = ddp.reducer
    reducer._set_optimizer_in_backward()


def prepare_for_backward(ddp: DistributedDataParallel) -> None:
    """Let ``ddp`` reduce a backward that no forward comes before."""
    ddp.reducer.prepare_for_backward([])


def forget_used_parameters(ddp: DistributedDataParallel) -> None:
    """Let the reducer of ``ddp`` forget which parameters took part in backwards; nothing if it cannot."""
    reset = getattr(ddp.reducer, "_reset_state", None)
    if reset is not None:
        reset()


@contextmanager
def disconnected() -> Iterator[None]:
    """Let this process be connected to no other inside the block: as it is afterwards, groups are there again."""
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


def is_part_of_flat_parameter(tensor: Tensor) -> bool:
    """Whether a tensor is a view of the flat parameter of an FSDP1 module, which makes new views for the backward."""
    return bool(getattr(tensor._base, "_is_flat_param", False))
