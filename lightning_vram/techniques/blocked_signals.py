"""Start processes that do not receive certain signals, since a cluster sends them to every process of a job."""

import multiprocessing
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any


@contextmanager
def blocked_in_children(signals: Sequence[int], context: Any = None) -> Iterator[None]:
    """Let processes that are started meanwhile begin with ``signals`` blocked, as they are here until the end.

    Args:
        signals: What is sent meanwhile arrives at the end. Where signals cannot be blocked (Windows), nothing happens.
        context: Of multiprocessing; ``None`` for its default. Processes of a fork server have the signals blocked
            only if it starts now.
    """
    if not signals or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    if (context or multiprocessing).get_start_method() != "fork":
        resource_tracker.ensure_running()  # Python 3.11 would start it meanwhile, and unblock SIGTERM by that
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
