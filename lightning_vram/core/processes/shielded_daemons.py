"""Keep data loader workers alive when a cluster signals every process of a job."""

import signal
from collections.abc import Sequence
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any


class DaemonShield:
    """From :meth:`raise_it` to :meth:`lower`, daemons of ``multiprocessing`` start with ``signals`` blocked.

    A data loader worker that dies of a signal ends the training before it has saved. Python ends daemons by SIGTERM,
    and waits for them: here it is SIGKILL. Where signals cannot be blocked (Windows), it does nothing.
    """

    def __init__(self, signals: Sequence[int]) -> None:
        self._signals = tuple(signals)
        self._start: Any = None

    def raise_it(self) -> None:
        """Shield daemons that this process starts from now on; those of a fork server only if it starts now."""
        if self._start is not None or not hasattr(signal, "pthread_sigmask"):
            return
        self._start = start = BaseProcess.start
        signals = self._signals

        def start_shielded(process: Any) -> None:
            if process.daemon:
                _start_shielded(process, start, signals)
            else:
                start(process)

        BaseProcess.start = start_shielded  # type: ignore[method-assign, assignment]

    def lower(self) -> None:
        """Start daemons as before; those that are shielded stay so. Calling it again does nothing."""
        if self._start is not None:
            BaseProcess.start, self._start = self._start, None  # type: ignore[method-assign]


def _start_shielded(process: Any, start: Any, signals: tuple[int, ...]) -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        if getattr(process, "_start_method", None) != "fork":
            resource_tracker.ensure_running()  # Python 3.11 would start it meanwhile, and unblock SIGTERM by that
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)  # a process begins with what its parent has blocked
        start(process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    process._popen.terminate = process._popen.kill
