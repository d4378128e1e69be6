"""Random numbers that do not come from torch: Python's and NumPy's, as in hand-written stochastic depth."""

import random
import sys
from types import TracebackType
from typing import Any


class HostRandomState:
    """The state of Python's and NumPy's global generators; as a context manager, the time in which it holds again."""

    def __init__(self) -> None:
        self._start: Any = _read()
        self._now: Any = None

    def settle(self) -> None:
        """Call after the forward: forget the state if nothing was drawn."""
        if _is_equal(self._start, _read()):
            self._start = None

    def __enter__(self) -> None:
        if self._start is not None:
            self._now = _read()
            _write(self._start)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._now is not None:
            _write(self._now)
            self._now = None


def _read() -> tuple[Any, Any]:
    numpy = sys.modules.get("numpy")  # not imported for this: torch works without it
    return random.getstate(), numpy.random.get_state() if numpy is not None else None


def _write(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    if state[1] is not None:
        sys.modules["numpy"].random.set_state(state[1])


def _is_equal(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    if one[0] != other[0] or (one[1] is None) != (other[1] is None):
        return False
    # NumPy's is a name, an array of keys, and numbers: bytes compare them all.
    return one[1] is None or _flat(one[1]) == _flat(other[1])


def _flat(numpy_state: Any) -> tuple[Any, ...]:
    return tuple(part.tobytes() if hasattr(part, "tobytes") else part for part in numpy_state)
