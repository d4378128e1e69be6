"""Record the signals by which a job is stopped, and do nothing else in their handler."""

import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

Handler = Callable[[int, Any], Any] | int | None


class StopSignals:
    """Records which of ``signals`` (the least important first) arrive while it is installed."""

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self.signals = tuple(signals)
        self._arrived: set[int] = set()
        self._before: dict[signal.Signals, Handler] = {}

    @property
    def strongest(self) -> int:
        """The place in ``signals``, from 1, of the most important that arrived; 0 if there was none."""
        return max((place for place, one in enumerate(self.signals, 1) if one in self._arrived), default=0)

    def install(self) -> bool:
        """Record signals from now on, also blocked ones and those that another object recorded; return success.

        Only the main thread can. Calling it again does nothing.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        for one in self.signals:
            if one not in self._before:
                self._before[one] = before = signal.getsignal(one)
                if (other := _noting(before)) is not None:
                    self._arrived |= other._arrived
                signal.signal(one, self.note)
        self.unblock()
        return True

    def unblock(self) -> None:
        """Unblock the signals in this thread."""
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals)

    def note(self, number: int, frame: Any = None) -> None:
        """The handler."""
        self._arrived.add(number)

    def remove(self, harmless: Sequence[signal.Signals] = ()) -> None:
        """Put the previous handlers back, which get what has arrived if they record it, too. It stays recorded here.

        Calling it again does nothing. ``harmless`` signals stay recorded if no handler is left: they would end the
        process.
        """
        if threading.current_thread() is threading.main_thread():
            kept = [one for one, handler in self._before.items() if one in harmless and handler == signal.SIG_DFL]
            for one, handler in self._before.items():
                if one not in kept and signal.getsignal(one) == self.note:
                    signal.signal(one, signal.SIG_DFL if handler is None else handler)
                    if (other := _noting(handler)) is not None:
                        other._arrived |= self._arrived
            self._before = {one: self._before[one] for one in kept}

    def __reduce__(self) -> tuple[Any, ...]:
        """In a copy nothing is installed."""
        return StopSignals, (self.signals,)


def _noting(handler: Handler) -> StopSignals | None:
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, StopSignals) else None
