"""The functions of a device's module, such as ``torch.cuda``, for a GPU you do not have."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import chain, cycle
from typing import Any

import torch

KIND = "lazy"
CARD = torch.device(KIND, 0)

_NOTHING = (
    *("synchronize", "empty_cache", "set_device", "manual_seed", "manual_seed_all", "set_rng_state"),
    "reset_peak_memory_stats",
)
_BYTES = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


class FinishedEvent:
    """An event that has always happened."""

    device = CARD
    device_index = 0
    device_type = 17  # of a lazy device: c10/core/DeviceType.h

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    synchronize = wait = record = _nothing

    def query(self) -> bool:
        """All is done."""
        return True

    def elapsed_time(self, _: Any) -> float:
        """No time."""
        return 0.0


class FinishedStream(FinishedEvent):
    """A stream that has always done what it was given. What is made on it comes from blocks of its own."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.stream_id = self.cuda_stream = next(_ids)

    def __enter__(self) -> "FinishedStream":
        _entered.append(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _entered.pop()

    wait_stream = wait_event = FinishedEvent._nothing

    def record_event(self, event: Any = None) -> Any:
        """The event, or a new one."""
        return event or FinishedEvent()

    def is_capturing(self) -> bool:
        """No graph is captured."""
        return False


_POOL = 32  # as many streams a card has, which are given out in turn: c10/cuda/CUDAStream.cpp
_ids = chain([0], cycle(range(1, _POOL + 1)))
_entered: list[FinishedStream] = []
_default = FinishedStream()


def _current_stream(*_: Any) -> FinishedStream:
    return _entered[-1] if _entered else _default


def device_functions(num_bytes: int, allocated_bytes: Callable[[], int]) -> dict[str, Any]:
    """Return the functions and classes that modules of devices have in common, by their names there."""
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda *_: nullcontext(),
        "mem_get_info": lambda *_, **__: (max(0, num_bytes - allocated_bytes()), num_bytes),
        "get_rng_state": lambda *_: torch.default_generator.get_state(),
        "Stream": FinishedStream,
        "Event": FinishedEvent,
        "stream": lambda stream: stream or nullcontext(),
        "current_stream": _current_stream,
        "default_stream": lambda *_: _default,
    }
    functions |= {name: lambda *_, **__: None for name in _NOTHING}
    return functions | {name: lambda *_, **__: allocated_bytes() for name in _BYTES}
