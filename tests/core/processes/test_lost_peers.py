"""A rank that lost another one says where it is, in the words of the backend; every other error is left alone."""

import os
import signal
import socket
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_vram.core.ranks import LostPeerError, RankAgreementError, check_store, naming_lost_peers

LOOK = ". See the log of the rank that failed first; if it is only slow, increase `timeout=`."


def raise_named(error: Exception) -> None:
    with naming_lost_peers(0, 2, lambda: "step 12, backward"):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[gloo/transport/tcp/pair.cc:537] Read error [10.0.0.3]:13711: Connection reset by peer."),
        RuntimeError("[gloo/transport/tcp/pair.cc:544] Connection closed by peer [fe80::1]:40364"),
        RuntimeError("timed out connecting: SO_ERROR: Connection refused, remote=[10.0.0.3]:20882$1"),
        RuntimeError("writev [10.0.0.3]:5: Broken pipe"),
        RuntimeError("NCCL error, ncclRemoteError: a remote process exiting: recv from 10.0.0.3<43210> failed"),
        RuntimeError("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?"),
        RuntimeError("NCCL communicator was aborted on rank 0."),
        RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation"),
        RuntimeError("[gloo/transport/tcp/pair.cc:152] timed out connecting: remote=[10.0.0.3]:20882"),
        RuntimeError("Application timeout caused pair closure"),
        RuntimeError("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 3000 ms"),
        dist.DistStoreError("wait timeout after 3000ms, keys: /default_pg/0//x"),
        dist.DistStoreError("Timed out after 4 seconds waiting for clients. 1/2 clients joined."),
        dist.DistNetworkError("The client socket has timed out after 3000ms while trying to connect to (a, 1)."),
        dist.DistBackendError("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)"),
        dist.DistBackendError("WorkNCCL(SeqNum=7) ran for 3001 milliseconds before timing out."),
    ],
)
def test_the_backends_words_get_rank_and_place(error: Exception, caplog: pytest.LogCaptureFixture):
    with pytest.raises(LostPeerError) as caught:
        raise_named(error)
    words = str(error).removesuffix(".")
    message = f"Rank 0 of 2 on {socket.gethostname()}, step 12, backward, lost another rank: {words}{LOOK}"
    assert str(caught.value) == message
    assert caplog.messages == [message]
    assert caught.value.__cause__ is error


def test_a_decision_that_a_rank_did_not_take_part_in_is_named_in_the_words_of_its_cause():
    error = RankAgreementError("Rank 0 waited for a decision of all ranks.")
    error.__cause__ = RuntimeError("Connection closed by peer")
    with pytest.raises(LostPeerError, match=r"step 12, backward, lost another rank: Connection closed by peer\. See "):
        raise_named(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 2x4)"),
        ConnectionRefusedError("Connection refused"),  # of the user's own data base
        ValueError("Timed out waiting"),
        RuntimeError("NCCL error in: unhandled cuda error 'out of memory'. Last error: Connection closed by peer"),
        LostPeerError("Connection refused"),  # an inner context named it
    ],
)
def test_any_other_error_passes_as_it_is(error: Exception, caplog: pytest.LogCaptureFixture):
    with pytest.raises(type(error)) as caught:
        raise_named(error)
    assert caught.value is error
    assert caplog.messages == []
    assert error.__cause__ is None


def test_the_innermost_context_names_the_place_and_one_may_be_entered_again(caplog: pytest.LogCaptureFixture):
    outer = naming_lost_peers(0, 2, lambda: "fit")
    inner = naming_lost_peers(0, 2, lambda: "step 3")
    for _ in range(2):
        with pytest.raises(LostPeerError, match=r"^Rank 0 of 2 on [^ ]+, step 3, "), outer, outer, inner:
            raise RuntimeError("Connection closed by peer")
    assert len(caplog.messages) == 2


def train(rank: int, path: Path, fate: signal.Signals, timeout: timedelta) -> None:
    """Reduce at three steps; rank 1 is sent a signal before the last one."""
    store = dist.FileStore(f"{path}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    step = 0
    naming = naming_lost_peers(rank, 2, lambda: f"step {step}, backward")
    try:
        for step in range(3):  # the place reads it
            if rank == 1 and step == 2:
                os.kill(os.getpid(), fate)
            with naming:
                dist.all_reduce(torch.ones(2))
    except LostPeerError as error:
        (path / "error").write_text(str(error))
        raise SystemExit(3) from error


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("fate", "timeout", "words"),
    [
        (signal.SIGKILL, timedelta(minutes=30), ""),  # at once
        (signal.SIGSTOP, timedelta(seconds=3), "Timed out waiting 3000ms"),
    ],
    ids=["is killed", "hangs"],
)
def test_a_rank_that_is_lost_is_named(tmp_path: Path, fate: signal.Signals, timeout: timedelta, words: str):
    fork = mp.get_context("fork")
    ranks = [fork.Process(target=train, args=(rank, tmp_path, fate, timeout)) for rank in range(2)]
    for process in ranks:
        process.start()
    ranks[0].join(60)
    ranks[1].kill()
    ranks[1].join()
    assert ranks[0].exitcode == 3
    message = (tmp_path / "error").read_text()
    assert message.startswith(f"Rank 0 of 2 on {socket.gethostname()}, step 2, backward, lost another rank: ")
    assert words in message


@pytest.mark.parametrize(("shares_store", "max_restarts"), [("True", "0"), ("False", "2"), ("True", "2")])
def test_restarts_need_a_store_of_their_own(monkeypatch, shares_store, max_restarts):
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shares_store)
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", max_restarts)
    is_refused = (shares_store, max_restarts) == ("True", "2")  # ranks would meet at the addresses of dead ones
    message = r"^torchrun --max-restarts would start ranks again with .*_STORE=1 in its"
    with pytest.raises(RuntimeError, match=message) if is_refused else nullcontext():
        check_store()
