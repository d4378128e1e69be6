"""The state around a forward: random generators, autocast, default dtype and device, backends, context variables."""

import random
from collections.abc import Callable
from contextlib import ExitStack
from contextvars import copy_context
from functools import cache
from typing import TypeVar

import torch

from lightning_vram.core.random_state.sources import default_source, differs, host_sources
from lightning_vram.private_names.torch.autocast import (
    read_flags,
    read_parametrizations,
    write_flags,
    write_parametrizations,
)
from lightning_vram.private_names.torch.dispatch import default_device_of_block

_T = TypeVar("_T")
_HOST = torch.device("cpu")
_Autocast = tuple[bool, torch.dtype, bool]


class AmbientState:
    """Random generators, autocast, default dtype and device, backends and context variables at the time it is made.

    ``devices`` are those on which a forward may compute or draw random numbers, in addition to the host. ``has_numpy``:
    whether NumPy's global generator counts, whose state takes long to read.
    """

    def __init__(self, devices: set[torch.device], *, has_numpy: bool = True) -> None:
        devices.add(_HOST)
        kinds = {device.type for device in devices}
        self._autocasts = {kind: _read_autocast(kind) for kind in kinds if _can_autocast(kind)}
        self._default_device = default_device_of_block()
        self._flags = read_flags()
        self._parametrizations = read_parametrizations()
        self._context = copy_context()
        sources = filter(None, map(default_source, devices - {torch.device("meta")}))
        self._generators = [(read, write, read()) for read, write in sources]
        self._hosts = [(read, write, read()) for read, write in host_sources()[: None if has_numpy else 1]]

    def settle(self) -> set[str]:
        """Drop unchanged states of Python's and NumPy's generators; return the changed: ``"python"``, ``"numpy"``."""
        self._hosts = [one for one in self._hosts if differs(one[2], one[0]())]
        return {"python" if write is random.setstate else "numpy" for _, write, _ in self._hosts}

    def run(self, work: Callable[[], _T]) -> _T:
        """Return the result of ``work`` in this state; generators go on afterwards from where they are now."""
        # A copy: a context can be entered once at a time, and a graph that is retained is recomputed again.
        return self._context.copy().run(self._run, work)

    def _run(self, work: Callable[[], _T]) -> _T:
        with ExitStack() as stack:
            for read, write, state in (*self._generators, *self._hosts):
                stack.callback(write, read())
                write(state)
            flags, parametrizations = read_flags(), read_parametrizations()
            if flags != self._flags:
                stack.callback(write_flags, flags)
                write_flags(self._flags)
            if self._parametrizations or parametrizations:
                stack.callback(write_parametrizations, parametrizations)
                write_parametrizations(self._parametrizations)
            for kind, then in self._autocasts.items():
                if then != _read_autocast(kind):
                    is_enabled, dtype, has_cache = then
                    stack.enter_context(torch.autocast(kind, dtype, is_enabled, has_cache))
            if default_device_of_block() != self._default_device:
                stack.enter_context(self._default_device or _HOST)
            return work()


@cache
def _can_autocast(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind)


def _read_autocast(kind: str) -> _Autocast:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()
