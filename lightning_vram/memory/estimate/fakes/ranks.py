"""A process group of many ranks in one process, all of which do what this one does."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch.distributed as dist

from lightning_vram.memory.estimate.fakes.device_module import KIND
from lightning_vram.memory.estimate.replaced import replaced
from lightning_vram.private_names.torch.fakes import BACKEND, connect_fake_ranks


@contextmanager
def fake_ranks(num_ranks: int) -> Iterator[None]:
    """Let this process be rank 0 of ``num_ranks`` inside the block. Collectives send nothing."""
    if dist.is_initialized():
        raise RuntimeError("estimate_memory simulates ranks, but torch.distributed is already initialized here.")
    with ExitStack() as stack:
        backends = dist.Backend.default_device_backend_map
        backends[KIND] = BACKEND
        stack.callback(backends.pop, KIND)
        connect_fake_ranks(("cpu", KIND), num_ranks)
        stack.callback(dist.destroy_process_group)
        new_group, backend = dist.new_group, f"cpu:{BACKEND},{KIND}:{BACKEND}"
        functions: dict[str, Any] = {
            "new_group": lambda ranks=None, *_, **kwargs: new_group(ranks, **{**kwargs, "backend": backend}),
            "barrier": lambda *_, **__: None,
            "broadcast_object_list": lambda *_, **__: None,
            "all_gather_object": _gather_same,
        }
        stack.enter_context(replaced(dist, functions))
        yield


def _gather_same(objects: list[Any], value: Any, group: Any = None) -> None:
    objects[:] = [value] * len(objects)
