"""Signals are noted, and their handlers put back."""

import os
import signal
import threading

import pytest

from lightning_vram.core import processes
from lightning_vram.core.processes import StopSignals, note_signal

TERM, USR1, USR2 = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2


@pytest.fixture
def signals():
    for number in (TERM, USR1):
        signal.signal(number, signal.SIG_DFL)
    signals = StopSignals((TERM, USR1))
    yield signals
    signals.remove()
    processes._arrived.clear()


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_the_last_of_those_that_arrived_counts_most(signals):
    assert signals.install()
    assert signals.strongest == 0
    send(TERM)
    assert signals.strongest == 1
    send(USR1)
    assert signals.strongest == 2
    send(TERM)
    assert signals.strongest == 2


def test_signals_that_were_blocked_are_taken_in(signals):
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {USR1})
    try:
        signal.pthread_kill(threading.get_ident(), USR1)  # threads of torch's have it not blocked
        assert signals.strongest == 0
        signals.install()
        assert signals.strongest == 2
        assert USR1 not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def test_handlers_are_put_back(signals):
    def handler(number, frame):
        raise AssertionError

    before, of_term = signal.signal(USR1, handler), signal.getsignal(TERM)
    try:
        signals.install()
        signals.install()
        assert signal.getsignal(USR1) == note_signal
        send(USR1)
        signals.remove()
        assert signal.getsignal(USR1) is handler
        assert signal.getsignal(TERM) == of_term
        signals.remove()
        assert signals.strongest == 2
    finally:
        signal.signal(USR1, before)


def test_a_signal_that_would_end_the_process_may_stay_harmless_until_another_takes_it_over(signals):
    signals.install()
    signals.remove(harmless=(USR1,))
    assert signal.getsignal(TERM) == signal.SIG_DFL
    send(USR1)
    other = StopSignals((TERM, USR1))
    other.install()
    assert signals.strongest == other.strongest == 2
    other.remove()
    assert signal.getsignal(USR1) == signal.SIG_DFL


def test_one_that_somebody_handles_is_theirs_again(signals):
    before = signal.signal(USR1, signal.SIG_IGN)
    try:
        signals.install()
        signals.remove(harmless=(USR1,))
        assert signal.getsignal(USR1) == signal.SIG_IGN
    finally:
        signal.signal(USR1, before)


def test_only_the_main_thread_installs_and_removes(signals):
    results = []
    thread = threading.Thread(target=lambda: results.append(signals.install()))
    thread.start()
    thread.join()
    assert results == [False]
    assert signal.getsignal(USR1) != note_signal
    signals.install()
    thread = threading.Thread(target=signals.remove)
    thread.start()
    thread.join()
    assert signal.getsignal(USR1) == note_signal
