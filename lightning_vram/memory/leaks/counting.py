"""Count live bytes by asking allocators."""

import ctypes
import time
from collections.abc import Callable

import torch

from lightning_vram.memory.device.accelerators import has_statistics
from lightning_vram.memory.units import MIB

_FREE_SECONDS = 1.0  # for tests, and short runs
_SHARE = 0.005  # of the time
_FIELDS = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class _MallocInfo(ctypes.Structure):
    """``struct mallinfo2`` of glibc: ``uordblks`` and ``hblkhd`` are bytes in use, in heaps and in their own maps."""

    _fields_ = tuple((name, ctypes.c_size_t) for name in _FIELDS.split())


class LiveBytes:
    """Counts live bytes of a training's device, and of the host: there whatever else a program has, too."""

    def __init__(self, device: torch.device) -> None:
        self._counters: dict[str, Callable[[], int]] = {}
        if has_statistics(device.type):
            module = torch.get_device_module(device)
            self._counters[str(device)] = lambda: int(module.memory_allocated(device))
        host = _host_counter()
        if host is not None:
            self._counters["cpu"] = host

    def read(self) -> dict[str, int]:
        """Return bytes by device. Those that nobody counts are left out: the host of macOS and Windows, MPS."""
        return {name: count() for name, count in self._counters.items()}


class Pace:
    """Says in which steps to count, so that counting takes little of the time."""

    def __init__(self) -> None:
        self.stride = 1  # in steps
        self._start = time.perf_counter()
        self._spent = 0.0

    def is_due(self, step: int) -> bool:
        """Whether a step is to be counted."""
        return step % self.stride == 0

    def slow_down(self, seconds: float) -> bool:
        """Note what a count has taken. Returns whether the stride has doubled."""
        now = time.perf_counter()
        self._spent += seconds
        is_slower = self._spent > _FREE_SECONDS + _SHARE * (now - self._start)
        if is_slower:
            self.stride *= 2
            self._spent, self._start = _FREE_SECONDS, now
        return is_slower


def _host_counter() -> Callable[[], int] | None:
    """Return what counts the host's memory; ``None`` where tensors do not come from glibc."""
    read_info = getattr(_c_library(), "mallinfo2", None)
    if read_info is None:
        return None
    read_info.restype = _MallocInfo

    def count() -> int:
        info = read_info()
        return int(info.uordblks + info.hblkhd)

    before = count()
    probe = torch.empty(MIB, dtype=torch.uint8, device="cpu")
    is_counted = count() - before >= probe.nbytes // 2  # not of jemalloc or mimalloc, beside which glibc's stand still
    return count if is_counted else None


def _c_library() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(None)
    except (OSError, TypeError):  # Windows
        return None
