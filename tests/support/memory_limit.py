"""A device with little memory, anywhere: an out-of-memory error as soon as live tensor bytes pass a limit."""

import weakref
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from lightning_vram.memory.storages import iterate_storages, iterate_tensors


class MemoryLimit(TorchDispatchMode):
    """Counts storages born inside, and raises what CUDA would when an operator's result passes the limit.

    ``limit_bytes=None`` only counts. ``veto`` is asked at each operator whether memory runs out there, come what may.
    """

    def __init__(self, limit_bytes: int | None = None, veto: Callable[[], bool] = lambda: False) -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.veto = veto
        self.live_bytes = 0
        self.peak_bytes = 0
        self.num_errors = 0
        self.errors_in_backward = 0
        self._references: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # what the wrapper runs inside comes here again
        result = func(*args, **(kwargs or {}))
        before = self.live_bytes
        for tensor in iterate_tensors(result):
            for storage, _ in iterate_storages(tensor):
                self._count(storage)
        if self.live_bytes <= before:
            return result  # what allocates nothing does not run out
        over = self.limit_bytes is not None and self.live_bytes > self.limit_bytes
        if over or self.veto():
            del result
            self.num_errors += 1
            self.errors_in_backward += torch._C._current_graph_task_id() != -1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Limit {self.limit_bytes}, live {self.live_bytes}.")
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _count(self, storage):
        key = storage._cdata
        if key in self._references:
            return
        size = storage.nbytes()

        def forget(_):
            self.live_bytes -= size
            del self._references[key]

        self._references[key] = weakref.ref(storage, forget)
        self.live_bytes += size
