"""Hold a setting of the whole process at a value for as long as anybody needs it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")


class HeldSetting(Generic[T]):
    """Several may hold it at once, in any order and thread: the first one sets it, the last one puts it back.

    Args:
        read: Returns the setting.
        write: Sets it.
        value: What it is held at.
    """

    def __init__(self, read: Callable[[], T], write: Callable[[T], None], value: T) -> None:
        self._read, self._write, self._value = read, write, value
        self._before = value
        self._num_holders = 0
        self._lock = threading.Lock()

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold it inside the block."""
        with self._lock:
            if self._num_holders == 0:
                self._before = self._read()
                self._write(self._value)
            self._num_holders += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_holders -= 1
                if self._num_holders == 0:
                    self._write(self._before)
