"""Host-device copies and host work that overlap with the computation.

On an accelerator all copies of both directions are queued on one side stream, so that reused host memory is written
after it was read. The device memory of a copy is held until the stream of the computation waits for that copy, or it
has finished. On the CPU and on fake tensors copies block. The current stream is looked up at each call: the backward
runs in a thread of autograd's own.
"""

import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_vram.core.host.memory import hidden_from_modes
from lightning_vram.memory.device.accelerators import has_streams
from lightning_vram.private_names.dispatcher import detect_fake_mode

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


@dataclass(slots=True, eq=False)
class D2HCopy:
    """A copy to the host; ``source`` is held as long as the copy is in flight, then ``None``."""

    source: Tensor | None = None
    event: Any = None
    stream: Any = None

    def wait(self) -> None:
        """Block until the bytes are on the host."""
        if self.event is not None:
            self.event.synchronize()

    def precede(self) -> None:
        """Queue what the computation does from now on behind the copy: it is going to write to ``source``."""
        if self.event is not None and not self.event.query():
            self.stream.wait_event(self.event)


class H2DCopy:
    """A copy to the device, finished or in flight."""

    def wait(self, target: Tensor) -> None:
        """Let later work on the current stream find the bytes in ``target``."""

    def finish(self) -> None:
        """Block until the bytes have left the host."""


class Copies:
    """Copies flat tensors of bytes between one device and host memory in pieces; blocking, on the current stream."""

    def send(self, source: Tensor, pieces: Sequence[Tensor], window_bytes: int) -> D2HCopy:
        """Copy ``source`` to the host; at most ``window_bytes`` of the device are held for copies in flight."""
        with hidden_from_modes(source):
            scatter(source, pieces, is_blocking=True)
        return D2HCopy()

    def mark(self) -> Any:
        """Return the present moment of the computation: memory that was made before it may be written after it."""

    def fetch(self, pieces: Sequence[Tensor], target: Tensor, moment: Any) -> H2DCopy:
        """Copy from the host into ``target``, which was made before ``moment``."""
        with hidden_from_modes(target):
            gather(pieces, target, is_blocking=True)
        return H2DCopy()

    def note_made(self, target: Tensor) -> H2DCopy:
        """Return a handle by which other streams wait for what the current one makes in ``target``."""
        return H2DCopy()

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
        self._departures: deque[D2HCopy] = deque()
        self._departing_bytes = 0
        self._arrivals: deque[_StreamH2DCopy] = deque()
        weakref.finalize(self, _let_go_of_all, self._departures, self._arrivals).atexit = False

    def send(self, source: Tensor, pieces: Sequence[Tensor], window_bytes: int) -> D2HCopy:  # noqa: D102
        compute = self._module.current_stream(self._device)
        self._side.wait_stream(compute)
        with self._module.stream(self._side), hidden_from_modes(source):
            scatter(source, pieces)
            event = self._side.record_event()
        departure = D2HCopy(source, event, compute)
        self._departures.append(departure)
        self._departing_bytes += source.nbytes
        self.settle(window_bytes)
        return departure

    def mark(self) -> Any:  # noqa: D102
        stream = self._module.current_stream(self._device)
        return stream, stream.record_event()

    def fetch(self, pieces: Sequence[Tensor], target: Tensor, moment: Any) -> "_StreamH2DCopy":  # noqa: D102
        stream, event = moment
        self._side.wait_event(event)  # kernels that are queued may still use that memory for what it was before
        with self._module.stream(self._side), hidden_from_modes(target):
            gather(pieces, target)
            arrival = _StreamH2DCopy(target, self._side.record_event(), stream, self._module)
        self._arrivals.append(arrival)
        self.settle()
        return arrival

    def note_made(self, target: Tensor) -> "_StreamH2DCopy":  # noqa: D102
        stream, event = self.mark()
        return _StreamH2DCopy(None, event, stream, self._module)

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
        self._departing_bytes -= oldest.source.nbytes if oldest.source is not None else 0
        _let_go(oldest)


@dataclass(eq=False)
class _StreamH2DCopy(H2DCopy):
    """Holds its target until the copy has finished or is waited for: its memory must not be given out before."""

    target: Tensor | None
    _event: Any
    _stream: Any
    _module: Any

    def wait(self, target: Tensor) -> None:
        current = self._module.current_stream(target.device)
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


def _let_go(departure: D2HCopy) -> None:
    if not departure.event.query():
        departure.stream.wait_event(departure.event)  # whoever gets the memory next is queued behind the copy
    if departure.source is not None:
        # Autograd would have held it until the backward; perhaps it was made for another stream, which goes on.
        note_use(departure.source, departure.stream)
    departure.source = None


def _let_go_of_all(departures: deque[D2HCopy], arrivals: "deque[_StreamH2DCopy]") -> None:
    while departures:
        _let_go(departures.popleft())
    while arrivals:
        arrivals.popleft().let_go()


def note_use(tensor: Tensor, stream: Any) -> None:
    """Tell the allocator that ``stream`` uses ``tensor``, if it was made for another stream."""
    with hidden_from_modes(tensor):
        tensor.record_stream(stream)


def scatter(source: Tensor, pieces: Sequence[Tensor], *, is_blocking: bool = False) -> None:
    """Copy ``source`` into ``pieces``, one after another."""
    note_copy(TO_HOST, source.nbytes)
    for piece, part in zip(pieces, torch.split(source, [piece.numel() for piece in pieces]), strict=True):
        piece.copy_(part, non_blocking=not is_blocking and _is_pinned(piece))


def gather(pieces: Sequence[Tensor], target: Tensor, *, is_blocking: bool = False) -> None:
    """Copy ``pieces`` into ``target``, one after another."""
    note_copy(TO_DEVICE, target.nbytes)
    for piece, part in zip(pieces, torch.split(target, [piece.numel() for piece in pieces]), strict=True):
        part.copy_(piece, non_blocking=not is_blocking and _is_pinned(piece))


def _is_pinned(piece: Tensor) -> bool:
    # Copies from and to other memory must not be left to themselves: the host would go on before they are done.
    return type(piece) is Tensor and piece.is_pinned()


def make_copies(tensor: Tensor) -> Copies:
    """Return the copies for the device of ``tensor``."""
    if type(tensor) is Tensor and has_streams(tensor.device.type):
        return StreamCopies(tensor.device)
    return Copies()


PATIENCE_SECONDS = 1.0  # between two looks whether the thread is still there


class Ticket:
    """One job, to wait for."""

    def __init__(self, worker: "HostWorker") -> None:
        self._worker = worker
        self._is_done = threading.Event()

    @property
    def is_done(self) -> bool:
        """Whether the job has ended."""
        return self._is_done.is_set()

    def wait(self) -> None:
        """Return when the job has ended; raise what it, or a job before it, raised, or if the thread is gone."""
        while not self._is_done.wait(PATIENCE_SECONDS):
            self._worker.check_alive()
        self._worker.check()


class HostWorker:
    """One thread for jobs in order. After an error it drops all later jobs, and every later call raises that error.

    ``num_threads``: of PyTorch in a job. ``on_end`` is called in the thread when it ends.
    """

    def __init__(self, name: str, num_threads: int, *, on_end: Callable[[], None] = lambda: None) -> None:
        self._errors: list[BaseException] = []
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Ticket] | None] = queue.SimpleQueue()
        started, num_before = threading.Event(), torch.get_num_threads()
        args = (self._jobs, self._errors, started, num_threads, on_end)
        self._thread = threading.Thread(target=_work, args=args, name=name, daemon=True)
        self._thread.start()
        started.wait()
        torch.set_num_threads(num_before)  # what the thread set counts for all that are made later
        self._end = weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Callable[[], None]) -> Ticket:
        """Run ``job`` after those before; on fake tensors at once, since their mode belongs to one thread."""
        self.check()
        ticket = Ticket(self)
        if detect_fake_mode() is not None:
            job()
            ticket._is_done.set()
            return ticket
        self._jobs.put((job, ticket))
        return ticket

    def arrange(self, tickets: Sequence[Ticket]) -> None:
        """Run the waiting jobs of ``tickets`` in that order; all others keep their place."""
        waiting = []
        with suppress(queue.Empty):
            while True:
                waiting.append(self._jobs.get_nowait())
        places = {ticket: place for place, ticket in enumerate(tickets)}
        chosen = [item for item in waiting if item is not None and item[1] in places]
        arranged = iter(sorted(chosen, key=lambda item: places[item[1]]))
        for item in waiting:
            self._jobs.put(next(arranged) if item is not None and item[1] in places else item)

    def check(self) -> None:
        """Raise what a job has raised."""
        if self._errors:
            raise self._errors[0]

    def check_alive(self) -> None:
        """Raise if the thread is gone, as in a forked process."""
        if not self._thread.is_alive():
            raise RuntimeError(f"The thread {self._thread.name!r} ended with unfinished jobs: was the process forked?")

    def drain(self) -> None:
        """Return when all jobs have ended, or were dropped. Raises nothing."""
        ticket = Ticket(self)
        self._jobs.put((lambda: None, ticket))
        while self._thread.is_alive() and not ticket.is_done:
            ticket._is_done.wait(PATIENCE_SECONDS)

    def stop(self) -> None:
        """End the thread after what it has to do."""
        self._end()
        if self._thread is not threading.current_thread():
            self._thread.join()


def _work(
    jobs: "queue.SimpleQueue[tuple[Callable[[], None], Ticket] | None]",
    errors: list[BaseException],
    started: threading.Event,
    num_threads: int,
    on_end: Callable[[], None],
) -> None:
    torch.get_num_threads()  # else the first operator would set what all threads have
    torch.set_num_threads(num_threads)
    started.set()
    while (item := jobs.get()) is not None:
        job, ticket = item
        try:
            if not errors:
                job()
        except BaseException as error:  # handed on, whatever it is
            errors.append(error)
        finally:
            ticket._is_done.set()
        del item, job, ticket  # else they would live until the next comes
    on_end()
