"""What a device's module (``torch.cuda``, say) is asked for, answered for a card that is not there."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

_NOTHING = (
    *("synchronize", "empty_cache", "set_device", "manual_seed", "manual_seed_all", "set_rng_state"),
    "reset_peak_memory_stats",
)
_BYTES = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")


class FinishedStream:
    """A stream, or an event on one, that has always done what it was given."""

    device_index = stream_id = cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> "FinishedStream":
        return self

    def __exit__(self, *_: Any) -> None: ...

    def _nothing(self, *_: Any, **__: Any) -> None: ...

    synchronize = wait_stream = wait_event = wait = record = _nothing

    def record_event(self, event: Any = None) -> Any:
        """The event, or a new one."""
        return event or type(self)()

    def query(self) -> bool:
        """All is done."""
        return True

    def is_capturing(self) -> bool:
        """No graph is captured."""
        return False

    def elapsed_time(self, _: Any) -> float:
        """No time."""
        return 0.0


def device_functions(
    num_bytes: int, allocated_bytes: Callable[[], int], stream_class: type[FinishedStream] = FinishedStream
) -> dict[str, Any]:
    """Return the functions and classes that modules of devices have in common, by their names there.

    Args:
        num_bytes: What the card has.
        allocated_bytes: Tells what is in tensors on it now.
        stream_class: Its streams and events.
    """
    stream = stream_class()
    functions: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda *_: nullcontext(),
        "mem_get_info": lambda *_, **__: (max(0, num_bytes - allocated_bytes()), num_bytes),
        "get_rng_state": lambda *_: torch.default_generator.get_state(),
        "Stream": stream_class,
        "Event": stream_class,
        "stream": lambda *_: nullcontext(),
        "current_stream": lambda *_: stream,
        "default_stream": lambda *_: stream,
    }
    functions |= {name: lambda *_, **__: None for name in _NOTHING}
    return functions | {name: lambda *_, **__: allocated_bytes() for name in _BYTES}
