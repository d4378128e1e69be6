"""Host-device copies and host work that overlap with the computation.

On an accelerator all copies of both directions are queued on one side stream, so that host memory which is used again
is written after it was read. The device memory of a copy is held until the stream of the computation waits for that
copy, or it has finished: after that, the allocator may give the memory to the next kernel of that stream. Elsewhere
(the CPU, which has one memory; fake tensors) copies block.

The current stream is looked up at each call: the backward runs in a thread of autograd's own.
"""

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.host.arena import unseen
from lightning_vram.core.host.copy_notes import TO_DEVICE, TO_HOST, note_copy
from lightning_vram.core.host.copy_times import (
    WAIT_FOR_FETCHING,
    WAIT_FOR_SENDING,
    Clock,
    CopyTimes,
    HostClock,
    StreamClock,
    timed,
)
from lightning_vram.memory.device.accelerators import has_streams


class Departure:
    """A copy to the host; ``source`` is held as long as the copy is in flight, then ``None``."""

    __slots__ = ("event", "num_bytes", "source", "stream", "times")

    def __init__(
        self,
        source: Tensor | None = None,
        event: Any = None,
        stream: Any = None,
        times: CopyTimes | None = None,
    ) -> None:
        self.times = times
        self.source = source
        self.num_bytes = source.nbytes if source is not None else 0
        self.event = event
        self.stream = stream

    def wait(self) -> None:
        """Block until the bytes are on the host."""
        if self.event is not None:
            self.event.synchronize()

    def precede(self) -> None:
        """Queue what the computation does from now on behind the copy: it is going to write to ``source``."""
        if self.event is not None and not self.event.query():
            self.stream.wait_event(self.event)


class Arrival:
    """A copy to the device, finished or in flight."""

    def wait(self, target: Tensor) -> None:
        """Let later work on the current stream find the bytes in ``target``."""

    def finish(self) -> None:
        """Block until the bytes have left the host."""


class Copies:
    """Copies flat tensors of bytes between one device and host memory in pieces; blocking, on the current stream."""

    times: CopyTimes | None = None
    """Where it is noted how long copies take from now on."""

    def make_clock(self) -> Clock | None:
        """Return a clock for both the computation and its copies; ``None`` if the device has none."""
        return HostClock()

    def send(self, source: Tensor, pieces: Sequence[Tensor], window_bytes: int) -> Departure:
        """Copy ``source`` to the host; at most ``window_bytes`` of the device are held for copies in flight."""
        with unseen(source), timed(self.times, TO_HOST, source.nbytes):
            scatter(source, pieces, is_blocking=True)
        return Departure()

    def mark(self) -> Any:
        """Return the present moment of the computation: memory that was made before it may be written after it."""

    def fetch(self, pieces: Sequence[Tensor], target: Tensor, moment: Any) -> Arrival:
        """Copy from the host into ``target``, which was made before ``moment``."""
        with unseen(target), timed(self.times, TO_DEVICE, target.nbytes):
            gather(pieces, target, is_blocking=True)
        return Arrival()

    def note_made(self, target: Tensor) -> Arrival:
        """Return a handle by which other streams wait for what the current one makes in ``target``."""
        return Arrival()

    def settle(self, window_bytes: int | None = None) -> None:
        """Release what finished copies hold, and all but ``window_bytes`` of copies to the host in flight."""

    def close(self) -> None:
        """Release everything: copies in flight are ordered before the next use of their memory."""


class StreamCopies(Copies):
    """Copies on a side stream of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device.type)
        self._side = self._module.Stream(device)
        self._departures: deque[Departure] = deque()
        self._departing_bytes = 0
        self._arrivals: deque[_StreamArrival] = deque()
        weakref.finalize(self, _let_go_of_all, self._departures, self._arrivals).atexit = False

    def make_clock(self) -> Clock | None:  # noqa: D102
        return StreamClock(self._module) if hasattr(self._module, "Event") else None

    def send(self, source: Tensor, pieces: Sequence[Tensor], window_bytes: int) -> Departure:  # noqa: D102
        compute = self._module.current_stream(self._device)
        self._side.wait_stream(compute)
        with self._module.stream(self._side), unseen(source), timed(self.times, TO_HOST, source.nbytes):
            scatter(source, pieces)
            event = self._side.record_event()
        departure = Departure(source, event, compute, self.times)
        self._departures.append(departure)
        self._departing_bytes += departure.num_bytes
        self.settle(window_bytes)
        return departure

    def mark(self) -> Any:  # noqa: D102
        stream = self._module.current_stream(self._device)
        return stream, stream.record_event()

    def fetch(self, pieces: Sequence[Tensor], target: Tensor, moment: Any) -> "_StreamArrival":  # noqa: D102
        stream, event = moment
        self._side.wait_event(event)  # kernels that are queued may still use that memory for what it was before
        with self._module.stream(self._side), unseen(target), timed(self.times, TO_DEVICE, target.nbytes):
            gather(pieces, target)
            arrival = _StreamArrival(target, self._side.record_event(), stream, self._module, self.times)
        self._arrivals.append(arrival)
        self.settle()
        return arrival

    def note_made(self, target: Tensor) -> "_StreamArrival":  # noqa: D102
        stream, event = self.mark()
        return _StreamArrival(None, event, stream, self._module)

    def settle(self, window_bytes: int | None = None) -> None:  # noqa: D102
        is_capturing = getattr(self._module, "is_current_stream_capturing", None)
        if is_capturing is not None and is_capturing():  # a graph: to ask for events would end that
            return
        while window_bytes is not None and self._departing_bytes > max(0, window_bytes):
            self._let_go_of_oldest()
        while self._departures and self._departures[0].event.query():
            self._let_go_of_oldest()
        while self._arrivals and self._arrivals[0].is_over():
            self._arrivals.popleft().target = None

    def close(self) -> None:  # noqa: D102
        self._departing_bytes = 0
        _let_go_of_all(self._departures, self._arrivals)

    def _let_go_of_oldest(self) -> None:
        oldest = self._departures.popleft()
        self._departing_bytes -= oldest.num_bytes
        _let_go(oldest)


class _StreamArrival(Arrival):
    """Holds its target until the copy has finished or is waited for: its memory must not be given out before."""

    __slots__ = ("_event", "_module", "_stream", "_times", "target")

    def __init__(
        self, target: Tensor | None, event: Any, stream: Any, module: Any, times: CopyTimes | None = None
    ) -> None:
        self._times = times
        self.target = target
        self._event = event
        self._stream = stream
        self._module = module

    def wait(self, target: Tensor) -> None:
        current = self._module.current_stream(target.device)
        with timed(self._times, WAIT_FOR_FETCHING, stream=current):
            current.wait_event(self._event)
        if current != self._stream:
            note_use(target, current)
        else:
            self.target = None

    def finish(self) -> None:
        self._event.synchronize()

    def is_over(self) -> bool:
        return self.target is None or self._event.query()

    def let_go(self) -> None:
        if not self.is_over():
            self._stream.wait_event(self._event)  # whoever gets the memory next is queued behind the copy
        self.target = None


def _let_go(departure: Departure) -> None:
    with timed(departure.times, WAIT_FOR_SENDING, stream=departure.stream):
        if not departure.event.query():
            departure.stream.wait_event(departure.event)  # whoever gets the memory next is queued behind the copy
    if departure.source is not None:
        # Autograd would have held it until the backward; perhaps it was made for another stream, which goes on.
        note_use(departure.source, departure.stream)
    departure.source = None


def _let_go_of_all(departures: deque[Departure], arrivals: "deque[_StreamArrival]") -> None:
    while departures:
        _let_go(departures.popleft())
    while arrivals:
        arrivals.popleft().let_go()


def note_use(tensor: Tensor, stream: Any) -> None:
    """Tell the allocator that ``stream`` uses ``tensor``, if it was made for another stream."""
    with unseen(tensor):
        tensor.record_stream(stream)


def scatter(source: Tensor, pieces: Sequence[Tensor], *, is_blocking: bool = False) -> None:
    """Copy ``source`` into ``pieces``, one after another."""
    note_copy(TO_HOST, source.nbytes)
    start = 0
    for piece in pieces:
        is_async = not is_blocking and _is_pinned(piece)
        piece.copy_(source.narrow(0, start, piece.numel()), non_blocking=is_async)
        start += piece.numel()


def gather(pieces: Sequence[Tensor], target: Tensor, *, is_blocking: bool = False) -> None:
    """Copy ``pieces`` into ``target``, one after another."""
    note_copy(TO_DEVICE, target.nbytes)
    start = 0
    for piece in pieces:
        is_async = not is_blocking and _is_pinned(piece)
        target.narrow(0, start, piece.numel()).copy_(piece, non_blocking=is_async)
        start += piece.numel()


def _is_pinned(piece: Tensor) -> bool:
    # Copies from and to other memory must not be left to themselves: the host would go on before they are done.
    return type(piece) is Tensor and piece.is_pinned()


def make_copies(tensor: Tensor) -> Copies:
    """Return the copies for the device of ``tensor``."""
    if type(tensor) is Tensor and has_streams(tensor.device.type):
        return StreamCopies(tensor.device)
    return Copies()
