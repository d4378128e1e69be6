"""Listeners for host-device copies, which dispatch modes do not see."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

TO_HOST, TO_DEVICE = "to the host", "to the device"
_listeners: list[Callable[[str, int], None]] = []


@contextmanager
def copies_noted(listener: Callable[[str, int], None]) -> Iterator[None]:
    """Call ``listener`` with the direction and bytes of each copy inside the block."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def note_copy(way: str, num_bytes: int) -> None:
    """Call the listeners."""
    for listener in _listeners:
        listener(way, num_bytes)
