"""Who wants to know what travels between host and device: copies of parts of the package run unseen by modes."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

TO_HOST, TO_DEVICE = "to the host", "to the device"
_listeners: list[Callable[[str, int], None]] = []


@contextmanager
def copies_noted(listener: Callable[[str, int], None]) -> Iterator[None]:
    """Have ``listener`` told of each copy inside the block: its way, and its bytes."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def note_copy(way: str, num_bytes: int) -> None:
    """Tell of a copy."""
    for listener in _listeners:
        listener(way, num_bytes)
