"""Note the signals by which a job is told to end, and do nothing in their handler.

Python runs a handler between two bytecodes of the main thread, which may hold locks or be within a collective: whatever
waits for another rank there can hang the job (Lightning #21406). So the handler notes the signal, and who can act on it
looks.
"""

import signal
import threading
from collections.abc import Callable, Sequence
from typing import Any

Handler = Callable[[int, Any], Any] | int | None


class StopSignals:
    """What has arrived while they were installed.

    Args:
        signals: In order of importance, the least first.
    """

    def __init__(self, signals: Sequence[signal.Signals]) -> None:
        self.signals = tuple(signals)
        self._arrived: set[int] = set()
        self._before: dict[signal.Signals, Handler] = {}

    @property
    def strongest(self) -> int:
        """Of those that arrived the place in ``signals``, from 1; 0 if there was none."""
        return max((place for place, one in enumerate(self.signals, 1) if one in self._arrived), default=0)

    def install(self) -> bool:
        """Note signals from now on, and take in those that were blocked and wait, or that another has noted meanwhile.

        Calling it again does nothing.

        Returns:
            Whether it could be done: only the main thread may.
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
        """Let through what was held back in this thread."""
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, self.signals)

    def note(self, number: int, frame: Any = None) -> None:
        """Be the handler."""
        self._arrived.add(number)

    def remove(self, harmless: Sequence[signal.Signals] = ()) -> None:
        """Put back the handlers of before, who learn what has arrived if they note it, too. It stays noted here.

        Calling it again does nothing.

        Args:
            harmless: Signals that are noted further where nobody else handles them, for they would end the process.
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
    """Whose handler it is, if it is one of ours."""
    owner = getattr(handler, "__self__", None)
    return owner if isinstance(owner, StopSignals) else None
