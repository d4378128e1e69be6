"""Decisions of all ranks: what they agree on, and what becomes of one that does not come or fails."""

import pickle
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from support.sharded_nets import on_ranks
from torch.distributed.checkpoint.api import CheckpointException

from lightning_vram.core.ranks import CheckpointError, RankAgreement, RankAgreementError, on_all_ranks


def raise_an_error_of_one_rank_on_all() -> None:
    def fail(error: BaseException) -> int:
        if dist.get_rank() == 1:
            raise error
        return dist.get_rank()

    with pytest.raises(CheckpointError) as caught:
        on_all_ranks(lambda: fail(OSError(28, "No space left on device")), "It could not be saved")
    assert str(caught.value) == "It could not be saved: OSError on rank 1: [Errno 28] No space left on device"
    assert isinstance(caught.value.__cause__, OSError) == (dist.get_rank() == 1)
    with pytest.raises(FileNotFoundError) as caught_kind:
        on_all_ranks(lambda: fail(FileNotFoundError("gone")), "It could not be read")
    assert str(caught_kind.value) == "gone"
    collected = CheckpointException("failed", {1: (KeyError("a"), None)})
    with pytest.raises(CheckpointError) as caught:
        on_all_ranks(lambda: fail(collected), "It could not be read")
    assert str(caught.value) == "It could not be read: KeyError on rank 1: 'a'"
    with pytest.raises(pickle.UnpicklingError, match="It could not be read: Weights only"):
        on_all_ranks(lambda: fail(pickle.UnpicklingError("Weights only")), "It could not be read")
    assert on_all_ranks(dist.get_rank, "It could not be read") == dist.get_rank()


def test_one_process_needs_no_group():
    with pytest.raises(CheckpointError, match="It failed: OSError on rank 0: full"):
        on_all_ranks(lambda: (_ for _ in ()).throw(OSError("full")), "It failed")
    assert on_all_ranks(lambda: 3, "It failed") == 3


SHORT = timedelta(seconds=3)  # longer than a busy machine keeps one of two ranks from coming
LATE = (
    r"^Rank 0 waited for a decision of all ranks, but another rank did not answer within {} s or has died\. "
    r"See the log of that rank\.$"
)


def test_one_rank_agrees_with_itself():
    agreement = RankAgreement()
    assert agreement.is_alone
    assert agreement.largest(3, -1) == (3, -1)
    assert agreement.begin_largest(3, -1)() == (3, -1)
    assert agreement.gather("value") == ["value"]
    agreement.close()
    agreement.close()


def test_a_timeout_is_positive():
    with pytest.raises(ValueError, match=r"^RankAgreement\(timeout\) must be positive, got 0:00:00\.$"):
        RankAgreement(timedelta())


def agree_on_the_largest() -> None:
    rank, agreement = dist.get_rank(), RankAgreement()
    assert not agreement.is_alone
    big = 2**53 + 1  # not a float64
    assert agreement.largest(rank, -rank, big * rank) == (1, 0, big)
    assert agreement.largest() == ()
    agreement.close()
    agreement.close()
    for decide in (lambda: agreement.largest(1), lambda: agreement.begin_largest(1), lambda: agreement.gather(1)):
        with pytest.raises(RankAgreementError, match=r"^The agreement between ranks was closed\.$"):
            decide()
    assert RankAgreement().largest(rank) == (1,)  # a second fit


def go_on_between_the_begin_and_the_end_of_a_decision() -> None:
    rank, agreement = dist.get_rank(), RankAgreement()
    if rank == 0:
        first = agreement.begin_largest(rank, -rank)  # it does not wait for the other
    dist.barrier()
    if rank == 1:
        first = agreement.begin_largest(rank, -rank)
    second = agreement.begin_largest(10 * rank)
    assert first() == (1, 0)
    assert second() == (10,)
    assert agreement.begin_largest()() == ()


def gather_values_in_the_order_of_ranks() -> None:
    rank, agreement = dist.get_rank(), RankAgreement()
    gathered = agreement.gather({"rank": rank, "tensor": torch.tensor([rank] * (rank + 1))})
    assert [each["rank"] for each in gathered] == [0, 1]
    assert [each["tensor"].tolist() for each in gathered] == [[0], [1, 1]]


def have_no_group_that_could_be_closed_while_another_rank_still_connects() -> None:
    new_group = dist.new_group
    until = time.monotonic() + 0.3  # the same clock on both

    def connect_slowly(**options: object) -> dist.ProcessGroup:
        group = new_group(**options)
        time.sleep(0.3)
        return group

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 0:
            patch.setattr(dist, "new_group", connect_slowly)
        RankAgreement()
    assert time.monotonic() >= until


def make_an_error_of_a_rank_that_never_comes() -> None:
    by_call, to_gather = RankAgreement(), RankAgreement(SHORT)
    started = time.monotonic()
    if dist.get_rank() == 0:
        with pytest.raises(RankAgreementError, match=LATE.format(0.5)) as caught:
            by_call.largest(1, timeout=timedelta(seconds=0.5))
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(RankAgreementError, match=LATE.format(3)):
            to_gather.gather(1)
        assert time.monotonic() - started < 20
    dist.barrier()  # the other one comes, too late
    started = time.monotonic()
    for decide in (lambda: by_call.largest(1), lambda: to_gather.gather(1)):
        with pytest.raises(RankAgreementError, match="did not answer within"):
            decide()
    assert time.monotonic() - started < 2  # it does not wait again
    by_call.close()
    dist.barrier()  # other groups go on
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2


@pytest.mark.distributed
def test_two_ranks(tmp_path):
    on_ranks(
        tmp_path,
        agree_on_the_largest,
        go_on_between_the_begin_and_the_end_of_a_decision,
        gather_values_in_the_order_of_ranks,
        raise_an_error_of_one_rank_on_all,
        have_no_group_that_could_be_closed_while_another_rank_still_connects,
        make_an_error_of_a_rank_that_never_comes,
    )


def leave_after_a_decision() -> None:
    agreement = RankAgreement()
    agreement.largest(0)
    if dist.get_rank() == 0:
        with pytest.raises(RankAgreementError, match="has died"):
            agreement.largest(1)
    raise SystemExit(0)


@pytest.mark.distributed
def test_a_rank_that_died_is_noticed_at_once(tmp_path):
    started = time.monotonic()
    on_ranks(tmp_path, leave_after_a_decision)
    assert time.monotonic() - started < 20  # of half an hour
