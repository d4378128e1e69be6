"""One thread for work on host memory that overlaps with the training."""

import queue
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

import torch

from lightning_vram.private_names.torch.dispatch import detect_fake_mode

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

    ``num_threads`` is for PyTorch's operators in a job, without effect on other threads; ``None``: as many as
    elsewhere, and the thread is started by the first job. ``on_end`` is called in the thread when it ends, or without
    one by :meth:`stop`.
    """

    def __init__(self, name: str, num_threads: int | None = None, *, on_end: Callable[[], None] | None = None) -> None:
        self._errors: list[BaseException] = []
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Ticket] | None] = queue.SimpleQueue()
        started, num_before = threading.Event(), torch.get_num_threads()
        args = (self._jobs, self._errors, started, num_threads, on_end)
        self._thread = threading.Thread(target=_work, args=args, name=name, daemon=True)
        self._on_end = on_end
        if num_threads is not None:
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
        if self._thread.ident is None:
            self._thread.start()
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

    def stop(self, *, wait: bool = True) -> None:
        """End the thread after what it has to do."""
        if self._end.detach():
            self._jobs.put(None)
            if self._thread.ident is None and self._on_end is not None:
                self._on_end()
        if wait and self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _work(
    jobs: "queue.SimpleQueue[tuple[Callable[[], None], Ticket] | None]",
    errors: list[BaseException],
    started: threading.Event,
    num_threads: int | None,
    on_end: Callable[[], None] | None,
) -> None:
    if num_threads is not None:
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
    if on_end is not None:
        on_end()
