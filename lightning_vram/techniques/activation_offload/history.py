"""Which forward is running, and how much one like it saved last time."""

import weakref
from typing import Any, Protocol

_MAX_KINDS = 256  # remembered; batches may have any length
_FEWEST_TO_PRUNE = 64


class _Saved(Protocol):
    number: int
    num_bytes: int


class Run:
    """What one forward saved, in order, and how much of it is on the device; expected is last time's, or 0."""

    __slots__ = ("_prune_at", "expected_bytes", "items", "largest_bytes", "resident_bytes", "saved_bytes")

    def __init__(self, expected_bytes: int = 0, largest_bytes: int = 0) -> None:
        self.expected_bytes = expected_bytes
        self.largest_bytes = largest_bytes
        self.saved_bytes = 0
        self.resident_bytes = 0  # on the device and not given back to autograd yet
        self.items: list[weakref.ref[Any]] = []
        self._prune_at = _FEWEST_TO_PRUNE

    def append(self, item: _Saved) -> None:
        """Note that ``item`` is saved, and number it."""
        item.number = len(self.items)
        self.items.append(weakref.ref(item))
        if len(self.items) >= self._prune_at:
            self._prune()

    def _prune(self) -> None:
        """Forget the dead if they are the most: of forwards, say, that one loss after the other dropped unused."""
        alive = [item for reference in self.items if (item := reference()) is not None]
        if 2 * len(alive) <= len(self.items):
            for number, item in enumerate(alive):
                item.number = number
            self.items = [weakref.ref(item) for item in alive]
            self.saved_bytes = sum(item.num_bytes for item in alive)
        self._prune_at = max(_FEWEST_TO_PRUNE, 2 * len(self.items))


class ForwardHistory:
    """Follows a program from forward to forward.

    A forward begins when the program is entered, and with what is saved after a backward asked for something. Two are
    of a kind if both were the n-th since the program was entered, and what they saved first has one size.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[int, int], tuple[int, int]] = {}  # total and largest bytes by kind, latest kind last
        self._run: Run | None = None
        self._kind = (0, 0)
        self._num_forwards = 0

    def start(self) -> None:
        """The program is entered."""
        self._run = None
        self._num_forwards = 0

    def end_forward(self) -> None:
        """A backward asked for something."""
        self._run = None

    def add(self, num_bytes: int) -> tuple[Run, int]:
        """Note that something is saved; return the run it belongs to, and the bytes that were saved in it before."""
        run = self._run
        if run is None:
            self._kind = (self._num_forwards, num_bytes)
            self._num_forwards += 1
            run = self._run = Run(*self._last.pop(self._kind, (0, 0)))
            if len(self._last) >= _MAX_KINDS:
                del self._last[next(iter(self._last))]
        position = run.saved_bytes
        run.saved_bytes += num_bytes
        run.largest_bytes = max(run.largest_bytes, num_bytes)
        self._last[self._kind] = run.saved_bytes, run.largest_bytes
        return run, position
