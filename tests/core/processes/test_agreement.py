"""Decisions of all ranks: what they agree on, and what becomes of one that does not come."""

import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_vram.core.ranks import RankAgreement, RankAgreementError

SHORT = timedelta(seconds=3)  # longer than a busy machine keeps one of two ranks from coming
LATE = (
    r"^Rank 0 waited for a decision of all ranks, but another rank did not answer within 3 s or has died\. "
    r"See the log of that rank\.$"
)


def join(rank: int, path: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(f"{path}/store", 2), rank=rank, world_size=2)


def start(run_rank, path: Path, *args: object) -> None:
    mp.start_processes(run_rank, (str(path), *args), nprocs=2, start_method="fork")


def test_one_rank_agrees_with_itself():
    agreement = RankAgreement()
    assert agreement.is_alone
    assert agreement.largest(3, -1) == (3, -1)
    assert agreement.begin_largest(3, -1)() == (3, -1)
    assert agreement.gather("value") == ["value"]
    agreement.close()
    agreement.close()


@pytest.mark.parametrize("timeout", [timedelta(), timedelta(seconds=-1)])
def test_a_timeout_is_positive(timeout):
    with pytest.raises(ValueError, match=rf"^RankAgreement\(timeout\) must be positive, got {timeout}\.$"):
        RankAgreement(timeout)


def agree(rank: int, path: str) -> None:
    join(rank, path)
    agreement = RankAgreement()
    assert not agreement.is_alone
    big = 2**53 + 1  # not a float64
    assert agreement.largest(rank, -rank, big * rank) == (1, 0, big)
    assert agreement.largest() == ()
    agreement.close()
    agreement.close()
    with pytest.raises(RankAgreementError, match=r"^The agreement between ranks was closed\.$"):
        agreement.largest(1)
    again = RankAgreement()  # a second fit
    assert again.largest(rank) == (1,)
    dist.barrier()
    dist.destroy_process_group()
    again.close()  # its group is gone already
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert RankAgreement().is_alone


@pytest.mark.distributed
def test_ranks_agree_on_the_largest(tmp_path):
    start(agree, tmp_path)


def wait_for_a_rank_that_never_comes(rank: int, path: str, by_call: bool) -> None:
    join(rank, path)
    agreement = RankAgreement() if by_call else RankAgreement(SHORT)
    longer = timedelta(minutes=1)  # than for any decision, which is the most there is
    started = time.monotonic()
    if rank == 0:
        with pytest.raises(RankAgreementError, match=LATE) as caught:
            agreement.largest(1, timeout=SHORT if by_call else longer)
        assert isinstance(caught.value.__cause__, RuntimeError)
        assert time.monotonic() - started < 20
    dist.barrier()  # the other one comes, too late
    started = time.monotonic()
    with pytest.raises(RankAgreementError, match="did not answer within"):
        agreement.largest(1)
    assert time.monotonic() - started < 2  # it does not wait again
    agreement.close()
    dist.barrier()  # other groups go on
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total == 2
    dist.destroy_process_group()


@pytest.mark.slow_except("True")
@pytest.mark.distributed
@pytest.mark.parametrize("by_call", [True, False])
def test_a_rank_that_never_comes_is_an_error_and_no_hang(tmp_path, by_call):
    start(wait_for_a_rank_that_never_comes, tmp_path, by_call)


def die(rank: int, path: str) -> None:
    join(rank, path)
    agreement = RankAgreement()
    agreement.largest(0)
    if rank == 0:
        with pytest.raises(RankAgreementError, match="has died"):
            agreement.largest(1)


@pytest.mark.distributed
def test_a_rank_that_died_is_noticed_at_once(tmp_path):
    started = time.monotonic()
    start(die, tmp_path)
    assert time.monotonic() - started < 20  # of half an hour


def make_alone(rank: int, path: str) -> None:
    join(rank, path)
    if rank == 0:
        with pytest.raises(RankAgreementError, match=LATE):
            RankAgreement(SHORT)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_group_that_a_rank_does_not_make_is_an_error(tmp_path):
    start(make_alone, tmp_path)


def make_slowly(rank: int, path: str) -> None:
    join(rank, path)
    made = Path(path) / "made"
    new_group = dist.new_group

    def connect_slowly(**options: object) -> dist.ProcessGroup:
        group = new_group(**options)
        time.sleep(0.3)
        made.touch()
        return group

    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            patch.setattr(dist, "new_group", connect_slowly)
        RankAgreement()
    assert made.exists()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
def test_no_rank_has_a_group_which_it_could_close_while_another_still_connects(tmp_path):
    start(make_slowly, tmp_path)


def begin(rank: int, path: str) -> None:
    join(rank, path)
    agreement = RankAgreement()
    if rank == 0:
        first = agreement.begin_largest(rank, -rank)  # it does not wait for the other
        (Path(path) / "begun").touch()
    else:
        while not (Path(path) / "begun").exists():
            pass
        first = agreement.begin_largest(rank, -rank)
    second = agreement.begin_largest(10 * rank)
    assert first() == (1, 0)
    assert second() == (10,)
    assert agreement.begin_largest()() == ()
    agreement.close()
    with pytest.raises(RankAgreementError, match=r"^The agreement between ranks was closed\.$"):
        agreement.begin_largest(1)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
def test_ranks_go_on_between_the_begin_and_the_end_of_a_decision(tmp_path):
    start(begin, tmp_path)


def gather(rank: int, path: str) -> None:
    join(rank, path)
    agreement = RankAgreement()
    gathered = agreement.gather({"rank": rank, "tensor": torch.tensor([rank] * (rank + 1))})
    assert [each["rank"] for each in gathered] == [0, 1]
    assert [each["tensor"].tolist() for each in gathered] == [[0], [1, 1]]
    agreement.close()
    with pytest.raises(RankAgreementError, match=r"^The agreement between ranks was closed\.$"):
        agreement.gather(1)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
def test_values_are_gathered_in_the_order_of_ranks(tmp_path):
    start(gather, tmp_path)


def gather_alone(rank: int, path: str, ends_later: bool) -> None:
    join(rank, path)
    agreement = RankAgreement(SHORT)
    if rank == 0:
        with pytest.raises(RankAgreementError, match=LATE):
            agreement.begin_largest(1)() if ends_later else agreement.gather(1)
        with pytest.raises(RankAgreementError, match=LATE):
            agreement.gather(1)  # at once
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow_except("False")
@pytest.mark.distributed
@pytest.mark.parametrize("ends_later", [True, False])
def test_a_rank_that_does_not_come_to_a_gathering_is_an_error(tmp_path, ends_later):
    start(gather_alone, tmp_path, ends_later)
