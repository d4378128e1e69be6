"""How long copies take, and how long the computation waits for them."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

WAIT_FOR_SENDING, WAIT_FOR_FETCHING = "wait for sending", "wait for fetching"


class HostClock:
    """The clock of the host, for devices whose copies block."""

    def mark(self, stream: Any = None) -> float:  # noqa: D102
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:  # noqa: D102
        return end - start


class StreamClock:
    """Events on the streams of a device, such as ``module=torch.cuda``; they cost nothing until they are read."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def mark(self, stream: Any = None) -> Any:  # noqa: D102
        event = self._module.Event(enable_timing=True)
        event.record(stream if stream is not None else self._module.current_stream())
        return event

    def seconds(self, start: Any, end: Any) -> float:  # noqa: D102
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


Clock = HostClock | StreamClock
"""Makes marks of the present moment of a stream, or of the current one; blocks to compute the time between two."""


class CopyTimes:
    """Records spans of time between marks of a clock."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._spans: list[tuple[str, int, Any, Any]] = []

    @contextmanager
    def span(self, what: str, num_bytes: int, stream: Any) -> Iterator[None]:
        """Record how long ``stream``, or the current one, takes for what is queued in the block."""
        start = self.clock.mark(stream)
        yield
        self._spans.append((what, num_bytes, start, self.clock.mark(stream)))

    def num_bytes(self, what: str) -> int:
        """Return the bytes of all spans of this name."""
        return sum(span[1] for span in self._spans if span[0] == what)

    def seconds(self, what: str) -> float:
        """Return the seconds of all spans of this name; blocks until they have ended."""
        return sum(self.clock.seconds(start, end) for kind, _, start, end in self._spans if kind == what)


def timed(times: CopyTimes | None, what: str, num_bytes: int = 0, stream: Any = None) -> AbstractContextManager[None]:
    """Return a context whose span is recorded in ``times``, if that is given."""
    return times.span(what, num_bytes, stream) if times is not None else nullcontext()
