"""The thread beside the training; on simulated streams, copies never meet what the computation does with the memory."""

import random
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch
import torch.multiprocessing as mp
from support.helpers import PlantedError
from torch import Tensor

from lightning_vram.core.host import transfers
from lightning_vram.core.host.transfers import Copies, HostWorker, StreamCopies

PATIENCE = 10  # seconds, of tests that would hang


@pytest.fixture
def worker() -> Iterator[HostWorker]:
    made = HostWorker("a worker", 1)
    yield made
    made.stop()


def fail() -> None:
    raise PlantedError("on purpose")


def nothing() -> None:
    pass


def test_jobs_are_done_one_after_the_other_in_a_thread_of_their_own(worker):
    go, done, threads = threading.Event(), [], set()

    def job(index: int) -> None:
        assert go.wait(PATIENCE)
        threads.add(threading.current_thread())
        done.append(index)

    tickets = [worker.submit(lambda index=index: job(index)) for index in range(20)]
    assert not any(ticket.is_done for ticket in tickets)
    go.set()
    tickets[-1].wait()
    assert done == list(range(20))
    assert all(ticket.is_done for ticket in tickets)
    assert [thread.name for thread in threads] == ["a worker"]


def test_an_error_reaches_everybody_who_asks_and_jobs_after_it_are_dropped(worker):
    go, done = threading.Event(), []
    failed = worker.submit(lambda: go.wait(PATIENCE) and fail())
    after = worker.submit(lambda: done.append(1))
    go.set()
    for _ in range(2):
        for ask in (failed.wait, after.wait, worker.check, lambda: worker.submit(nothing)):
            with pytest.raises(PlantedError, match=r"^on purpose$"):
                ask()
    worker.drain()  # raises nothing
    assert not done


def test_stop_ends_the_thread_after_what_was_given(worker):
    done = []
    for index in range(3):
        worker.submit(lambda index=index: done.append(index))
    worker.stop()
    assert done == [0, 1, 2]
    assert not worker._thread.is_alive()
    worker.stop()
    worker.drain()
    with pytest.raises(RuntimeError, match=r"^The thread 'a worker' ended with unfinished jobs: was the process "):
        worker.check_alive()


def test_its_number_of_threads_is_its_own():
    before, seen = torch.get_num_threads(), []
    worker = HostWorker("wide", before + 2)
    worker.submit(lambda: seen.append(torch.get_num_threads())).wait()
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    worker.stop()
    assert seen == [before + 2, before]
    assert torch.get_num_threads() == before


def use_in_child(rank: int, worker: HostWorker) -> None:
    transfers.PATIENCE_SECONDS = 0.01
    ticket = worker.submit(nothing)
    with pytest.raises(RuntimeError, match=r"was the process forked\?$"):
        ticket.wait()
    worker.drain()
    worker.stop()
    fresh = HostWorker("fresh", 1)
    fresh.submit(nothing).wait()


def test_a_forked_process_is_told_that_it_has_no_such_thread(worker):
    worker.submit(nothing).wait()
    mp.start_processes(use_in_child, (worker,), nprocs=1, start_method="fork")
    worker.submit(nothing).wait()  # that of the parent goes on


def test_waiting_jobs_are_done_in_another_order():
    worker, gate, done = HostWorker("test", 1), threading.Event(), []
    worker.submit(gate.wait)
    tickets = [worker.submit(partial(done.append, number)) for number in range(6)]
    worker.arrange([tickets[4], tickets[1], tickets[3]])
    gate.set()
    worker.drain()
    assert done == [0, 4, 2, 1, 3, 5]
    worker.stop()


SIZE = 64
NUM_ITEMS = 8


class Event:
    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.is_over = False

    def query(self) -> bool:
        self.machine.run_some()
        return self.is_over

    def synchronize(self) -> None:
        while not self.is_over:
            self.machine.run_one()


class Stream:
    """A queue of closures; one that returns ``False`` waits."""

    def __init__(self, machine: "Machine") -> None:
        self.machine = machine
        self.queue: deque[Callable[[], object]] = deque()
        machine.streams.append(self)

    def record_event(self) -> Event:
        event = Event(self.machine)
        self.queue.append(lambda: setattr(event, "is_over", True))
        return event

    def wait_event(self, event: Event) -> None:
        self.queue.append(lambda: event.is_over)

    def wait_stream(self, other: "Stream") -> None:
        self.wait_event(other.record_event())


class Machine:
    """A device with a compute stream, an allocator that hands freed memory on at once, and what torch.cuda has."""

    def __init__(self, seed: int) -> None:
        self.generator = random.Random(seed)
        self.streams: list[Stream] = []
        self.compute = Stream(self)
        self.local = threading.local()
        self.free: list[Tensor] = []
        self.memory: dict[int, Tensor] = {}

    def Stream(self, device: torch.device) -> Stream:  # noqa: N802
        return Stream(self)

    def current_stream(self, device: torch.device | None) -> Stream:
        return getattr(self.local, "current", self.compute)

    @contextmanager
    def stream(self, stream: Stream):
        self.local.current, before = stream, self.current_stream(None)
        yield
        self.local.current = before

    def run_one(self) -> bool:
        """Run what is next on a random stream that does not wait; ``False`` if there is none."""
        for stream in self.generator.sample(self.streams, len(self.streams)):
            if stream.queue and stream.queue[0]() is not False:
                stream.queue.popleft()
                return True
        return False

    def run_some(self) -> None:
        for _ in range(self.generator.randrange(4)):
            self.run_one()

    def allocate(self) -> Tensor:
        memory = self.free.pop(self.generator.randrange(len(self.free))) if self.free else torch.zeros(SIZE)
        self.memory[memory.data_ptr()] = memory
        tensor = memory[:]
        weakref.finalize(tensor, self.free.append, memory)
        return tensor

    def scatter(self, source: Tensor, pieces: list[Tensor]) -> None:
        memory = self.memory[source.data_ptr()]
        self.current_stream(None).queue.append(lambda: transfers_scatter(memory, pieces))

    def gather(self, pieces: list[Tensor], target: Tensor) -> None:
        memory = self.memory[target.data_ptr()]
        self.current_stream(None).queue.append(lambda: transfers_gather(pieces, memory))

    def kernel(self, work: Callable[[Tensor], None], tensor: Tensor) -> None:
        memory = self.memory[tensor.data_ptr()]
        self.compute.queue.append(lambda: work(memory))


transfers_scatter, transfers_gather = transfers.scatter, transfers.gather


@pytest.fixture
def make_machine(monkeypatch) -> Callable[[int], Machine]:
    def make(seed: int) -> Machine:
        machine = Machine(seed)
        monkeypatch.setattr(torch, "get_device_module", lambda _: machine)
        monkeypatch.setattr(transfers, "scatter", machine.scatter)
        monkeypatch.setattr(transfers, "gather", machine.gather)
        monkeypatch.setattr(transfers, "note_use", lambda tensor, stream: None)
        return machine

    return make


class Program:
    """Steps whose kernels write, send away, fetch ahead, read, and write into memory that was freed."""

    def __init__(self, machine: Machine) -> None:
        self.machine, self.generator = machine, machine.generator
        self.copies = StreamCopies(torch.device("cuda"))
        self.host = [[torch.zeros(SIZE // 2), torch.zeros(SIZE - SIZE // 2)] for _ in range(NUM_ITEMS)]
        self.num_wrong = 0

    def run(self, value: int) -> None:
        for number in range(NUM_ITEMS):
            self.send(number, value + number)
        arrivals = {}
        for number in reversed(range(NUM_ITEMS)):
            for ahead in range(max(0, number - self.generator.randrange(3)), number + 1):
                if ahead not in arrivals:
                    target = self.machine.allocate()
                    arrivals[ahead] = (self.copies.fetch(self.host[ahead], target, self.copies.mark()), target)
                    del target
            arrival, target = arrivals.pop(number)
            if self.generator.random() < 0.8:  # else nobody wants it after all
                arrival.wait(target)
                self.machine.kernel(self.check(value + number), target)
            del arrival, target
            self.scribble()

    def send(self, number: int, value: int) -> None:
        source = self.machine.allocate()
        self.machine.kernel(lambda memory: fill(memory, value), source)
        self.copies.send(source, self.host[number], window_bytes=self.generator.randrange(4) * SIZE * 4)
        del source
        self.scribble()

    def scribble(self) -> None:
        scratch = self.machine.allocate()  # perhaps what was just freed
        self.machine.kernel(lambda memory: fill(memory, -1), scratch)
        del scratch
        self.machine.run_some()

    def check(self, value: int) -> Callable[[Tensor], None]:
        def read(memory: Tensor) -> None:
            self.num_wrong += int((memory != value).sum())

        return read


def fill(memory: Tensor, value: int) -> None:
    memory.fill_(value)


def count_wrong_bytes(machine: Machine) -> int:
    program = Program(machine)
    for step in range(3):
        program.run(100 * step)
    while machine.run_one():
        pass
    assert not any(stream.queue for stream in machine.streams)
    return program.num_wrong


def test_copies_never_meet_what_kernels_write(make_machine) -> None:
    assert not any(count_wrong_bytes(make_machine(seed)) for seed in range(60))


@pytest.mark.parametrize(
    ("kind", "method", "broken"),
    [
        (transfers._StreamH2DCopy, "is_over", lambda copy: True),  # a copy that nobody waits for is not held
        (transfers._StreamH2DCopy, "wait", lambda copy, target: None),  # the computation does not wait for the copy
        (Stream, "wait_event", lambda stream, event: None),  # copies do not wait for the computation
    ],
    ids=["arrivals", "consumer", "copies"],
)
def test_the_simulation_finds_what_would_go_wrong(make_machine, monkeypatch, kind, method, broken) -> None:
    monkeypatch.setattr(kind, method, broken)
    assert any(count_wrong_bytes(make_machine(seed)) for seed in range(60))


def test_in_flight_at_most_the_window_is_held(make_machine) -> None:
    machine = make_machine(0)
    machine.run_some = lambda: None  # nothing ever finishes
    copies = StreamCopies(torch.device("cuda"))
    departures = []
    for _ in range(6):
        departures.append(copies.send(machine.allocate(), [torch.zeros(SIZE)], 2 * SIZE * 4))
        assert sum(departure.source is not None for departure in departures) <= 2
    assert [departure.source is not None for departure in departures] == [False] * 4 + [True] * 2


@pytest.mark.parametrize("end", [lambda copies: copies.close(), lambda copies: None])
def test_copies_that_are_dropped_do_not_meet_what_gets_their_memory(make_machine, end) -> None:
    """Something was fetched ahead that nobody wants, something is on its way out, and all is closed or forgotten."""
    for seed in range(40):
        machine = make_machine(seed)
        copies, host = StreamCopies(torch.device("cuda")), [torch.full((SIZE,), 7.0)]
        target = machine.allocate()
        copies.fetch(host, target, copies.mark())
        source = machine.allocate()
        machine.kernel(lambda memory: fill(memory, 5), source)
        copies.send(source, [sent := torch.zeros(SIZE)], 10**9)
        end(copies)
        del copies, target, source
        others = [machine.allocate() for _ in range(2)]
        for other in others:
            machine.kernel(lambda memory: fill(memory, 3), other)
        while machine.run_one():
            pass
        assert all(bool((machine.memory[other.data_ptr()] == 3).all()) for other in others)
        assert bool((sent == 5).all())


def test_the_allocator_learns_which_stream_used_what_is_let_go(make_machine, monkeypatch) -> None:
    machine, uses = make_machine(0), []
    monkeypatch.setattr(transfers, "note_use", lambda tensor, stream: uses.append((tensor, stream)))
    machine.run_some = lambda: None
    copies, source = StreamCopies(torch.device("cuda")), machine.allocate()
    machine.local.current = stream = Stream(machine)  # another than the one it was made for
    copies.send(source, [torch.zeros(SIZE)], 10**9)
    assert uses == []
    copies.settle(0)
    assert [(tensor is source, user is stream) for tensor, user in uses] == [(True, True)]


def test_plain_copies_are_never_left_to_themselves(monkeypatch) -> None:
    seen, copy = [], Tensor.copy_
    monkeypatch.setattr(transfers, "_is_pinned", lambda piece: True)
    monkeypatch.setattr(
        Tensor, "copy_", lambda self, other, non_blocking: seen.append(non_blocking) or copy(self, other)
    )
    host, copies = [torch.zeros(3), torch.zeros(2)], Copies()
    copies.send(torch.arange(5.0), host, 0)
    copies.fetch(host, target := torch.zeros(5), None)
    assert target.tolist() == [0, 1, 2, 3, 4]
    assert seen == [False] * 4
