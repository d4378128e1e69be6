"""What is done before Python ends; what a cluster sends to every process of a job does not reach daemons."""

import multiprocessing
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from multiprocessing import resource_tracker

import pytest
import torch.distributed as dist

from lightning_vram.core import processes
from lightning_vram.core.processes import leave_group, leave_group_at_exit, shielded_daemons


@pytest.fixture
def at_exit(monkeypatch):
    """What would run when Python ends, the last first."""
    waiting = []
    monkeypatch.setattr(processes.atexit, "register", waiting.append)
    monkeypatch.setattr(processes.atexit, "unregister", lambda f: f in waiting and waiting.remove(f))
    monkeypatch.setattr(processes, "_SETTLE_SECONDS", 0)
    return waiting


def test_a_group_is_left_at_exit(at_exit):
    leave_group_at_exit()
    leave_group_at_exit()
    assert len(at_exit) == 1
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    at_exit[0]()
    assert not dist.is_initialized()
    assert at_exit == []


def test_a_group_may_be_left_earlier(at_exit):
    leave_group_at_exit()
    leave_group()
    assert at_exit == []


SIGNALS = (signal.SIGUSR1, signal.SIGTERM)


@pytest.fixture
def shield() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        stack.enter_context(shielded_daemons(SIGNALS))
        yield stack


def tell_mask(connection) -> None:
    connection.send(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


def mask_of(method: str, *, daemon: bool = True) -> set[int]:
    """What is blocked in a process that is started now."""
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    process = context.Process(target=tell_mask, args=(there,), daemon=daemon)
    process.start()
    mask = here.recv()
    process.join()
    return mask


def test_a_daemon_begins_with_the_signals_blocked_and_this_process_goes_on_without(shield):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert mask_of("fork") == before | set(SIGNALS)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before


@pytest.mark.slow
def test_what_was_blocked_before_stays_blocked(shield, monkeypatch):
    resource_tracker.ensure_running()
    unblock = partial(signal.pthread_sigmask, signal.SIG_UNBLOCK, {signal.SIGTERM})
    monkeypatch.setattr(resource_tracker, "ensure_running", unblock)  # as the first time in Python 3.11
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        assert mask_of("spawn") == before | set(SIGNALS)
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before | set(SIGNALS)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_other_children_and_daemons_after_the_end_receive_them(shield):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert mask_of("fork", daemon=False) == before
    shield.close()
    assert mask_of("fork") == before


def test_python_ends_a_daemon_that_does_not_heed_sigterm(shield):
    process = multiprocessing.get_context("fork").Process(target=threading.Event().wait, daemon=True)
    process.start()
    process.terminate()  # as multiprocessing does at exit
    process.join()
    assert process.exitcode == -signal.SIGKILL
