"""What this process knows of other processes, put aside for a time.

* ``torch.distributed.distributed_c10d._world``: where process groups are kept; meant to be overridden | 2.11 -
  | nothing is estimated in a process that is connected to others
* ``torch.distributed.DeviceMesh._thread_id``: meshes of different ones are not equal | 2.11 - | after an estimate,
  sharded runs on the host may fail
* ``torch.distributed.distributed_c10d._World``: what it is | 2.11 - | as above
* ``torch.distributed.distributed_c10d._update_default_pg``: tells PyTorch's own threads of the rank | 2.11 - | as above
* ``torch._C._distributed_c10d._register_process_group``: gives operators a group by its name | 2.11 - | as above
* ``torch._C._distributed_c10d._resolve_process_group``: finds it | 2.11 - | as above
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

_FIRST_NAME = 1_000_000  # groups are numbered, and operators know them by their numbers
_NO_THREAD = -1


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
