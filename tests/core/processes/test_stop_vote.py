"""Votes on whether to stop: alone at once, together at the same call."""

import math
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from support.sharded_nets import on_ranks

from lightning_vram.core import processes
from lightning_vram.core.processes import StopSignals, StopVote, note_signal
from lightning_vram.core.ranks import RankAgreement

TERM, USR1 = signal.SIGTERM, signal.SIGUSR1


@pytest.fixture(autouse=True)
def no_signals() -> Iterator[None]:
    yield
    processes._arrived.clear()


def make_vote() -> StopVote:
    return StopVote(RankAgreement(), StopSignals((TERM, USR1)))


def test_alone_a_signal_is_known_at_once():
    vote = make_vote()
    assert not vote.exchange()
    note_signal(TERM)
    assert vote.exchange()
    assert vote.name == "SIGTERM"
    note_signal(USR1)
    assert vote.exchange()
    assert vote.name == "SIGUSR1"


def test_alone_there_is_no_limit():
    vote = make_vote()
    vote.limit(0)
    assert not vote.exchange_limited()
    note_signal(USR1)
    assert vote.exchange_limited()


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
