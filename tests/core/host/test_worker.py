"""The thread beside the training: order, errors that stay, its end, and processes that have no such thread."""

import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.multiprocessing as mp
from support.helpers import PlantedError

from lightning_vram.core.host import transfers
from lightning_vram.core.host.transfers import HostWorker

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
