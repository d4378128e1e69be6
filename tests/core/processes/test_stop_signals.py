"""Signals are noted, their handlers put back; ranks vote on whether to stop, together at the same call."""

import math
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist
from support.sharded_nets import on_ranks

from lightning_vram.core import processes
from lightning_vram.core.processes import StopSignals, StopVote, note_signal
from lightning_vram.core.ranks import RankAgreement

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.fixture
def signals():
    before = [signal.signal(number, signal.SIG_DFL) for number in (TERM, USR1)]
    signals = StopSignals((TERM, USR1))
    yield signals
    signals.remove()
    for number, handler in zip((TERM, USR1), before, strict=True):
        signal.signal(number, handler)


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

    signal.signal(USR1, handler)
    signals.install()
    signals.install()
    assert signal.getsignal(USR1) == note_signal
    send(USR1)
    signals.remove()
    assert signal.getsignal(USR1) is handler
    assert signal.getsignal(TERM) == signal.SIG_DFL
    signals.remove()
    assert signals.strongest == 2


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
    signal.signal(USR1, signal.SIG_IGN)
    signals.install()
    signals.remove(harmless=(USR1,))
    assert signal.getsignal(USR1) == signal.SIG_IGN


def test_only_the_main_thread_installs_and_removes(signals):
    with ThreadPoolExecutor() as other_thread:
        assert not other_thread.submit(signals.install).result()
        assert signal.getsignal(USR1) != note_signal
        signals.install()
        other_thread.submit(signals.remove).result()
        assert signal.getsignal(USR1) == note_signal


TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.fixture(autouse=True)
def no_signals() -> Iterator[None]:
    yield
    processes._arrived.clear()


def make_vote() -> StopVote:
    return StopVote(RankAgreement(), StopSignals((TERM, USR1)))


def test_alone_a_signal_is_known_at_once_without_a_limit():
    vote = make_vote()
    vote.limit(0)
    assert not vote.exchange_limited()
    assert not vote.exchange()
    note_signal(TERM)
    assert vote.exchange_limited()
    assert vote.exchange()
    assert vote.name == "SIGTERM"
    note_signal(USR1)
    assert vote.exchange()
    assert vote.name == "SIGUSR1"


def know_of_it_since_the_same_call() -> None:
    vote = make_vote()
    known = [vote.exchange(), vote.exchange()]
    if dist.get_rank() == 1:
        note_signal(TERM)
    known += [vote.exchange(), vote.exchange(), vote.exchange()]
    assert known == [False, False, False, True, True]  # in the call after the one that sends it
    assert vote.name == "SIGTERM"
    processes._arrived.clear()


def vote_as_often_in_evaluations_of_different_numbers_of_batches() -> None:
    rank, vote = dist.get_rank(), make_vote()
    vote.limit(1 + 2 * rank)  # one vote for both
    assert [vote.exchange_limited() for _ in range(1 + 2 * rank)] == [False] * (1 + 2 * rank)
    note_signal((TERM, USR1)[rank])
    assert not vote.exchange()  # it ends the vote of the evaluation
    assert vote.exchange()
    assert vote.name == "SIGUSR1"  # on both
    vote.limit(math.inf)
    assert not vote.exchange_limited()  # nobody knows how often it could vote
    vote.limit(math.inf if rank else 3)
    assert not vote.exchange_limited()
    vote.limit(3 - rank)
    assert [vote.exchange_limited() for _ in range(3)] == [True, True, False]


@pytest.mark.distributed
def test_two_ranks(tmp_path: Path):
    on_ranks(tmp_path, know_of_it_since_the_same_call, vote_as_often_in_evaluations_of_different_numbers_of_batches)
