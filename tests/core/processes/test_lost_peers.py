"""A rank that lost another one says so, in words; every other error is left alone."""

import os
import signal
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_vram.core.ranks import LostPeerError, naming_lost_peers

TIMEOUT = timedelta(seconds=3)
HERE = f"Rank 0 of 2 on {socket.gethostname()}, step 12, backward,"
SILENT = (
    f"{HERE} waited 3 s for another rank, which did not answer: it hangs, has died, or runs other "
    f"collectives. See the log of the rank that failed first; if it is only slow, increase `timeout=`."
)


def broken(peer: str) -> str:
    return (
        f"{HERE} lost {peer}: the connection broke. It failed with an error, or was killed, for example for "
        f"lack of host memory. See the log of the rank that failed first."
    )


def raise_named(error: Exception) -> None:
    with naming_lost_peers(0, 2, lambda: "step 12, backward", TIMEOUT):
        raise error


@pytest.mark.parametrize(
    ("text", "peer"),
    [
        ("[gloo/transport/tcp/pair.cc:537] Read error [10.0.0.3]:13711: Connection reset by peer.", "10.0.0.3"),
        ("[gloo/transport/tcp/pair.cc:544] Connection closed by peer [fe80::1]:40364", "fe80::1"),
        ("timed out connecting: SO_ERROR: Connection refused, remote=[10.0.0.3]:20882$1", "10.0.0.3"),
        ("writev [10.0.0.3]:5: Broken pipe", "10.0.0.3"),
        ("NCCL error, ncclRemoteError: a remote process exiting: recv from 10.0.0.3<43210> failed", "10.0.0.3"),
        ("Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?", None),
        ("NCCL communicator was aborted on rank 0.", None),
    ],
)
def test_a_broken_connection_is_a_peer_that_died(text: str, peer: str | None):
    error = RuntimeError(text)
    with pytest.raises(LostPeerError) as caught:
        raise_named(error)
    assert str(caught.value) == broken(f"a process on {peer}" if peer else "another rank")
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
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
def test_a_timeout_is_a_peer_that_did_not_answer(error: Exception, caplog: pytest.LogCaptureFixture):
    with pytest.raises(LostPeerError) as caught:
        raise_named(error)
    assert str(caught.value) == SILENT
    assert caplog.messages == [SILENT]
    assert caught.value.__cause__ is error


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
    outer = naming_lost_peers(0, 2, lambda: "fit", TIMEOUT)
    inner = naming_lost_peers(0, 2, lambda: "step 3", TIMEOUT)
    for _ in range(2):
        with pytest.raises(LostPeerError, match=r"^Rank 0 of 2 on [^ ]+, step 3, "), outer, outer, inner:
            raise RuntimeError("Connection closed by peer")
    assert len(caplog.messages) == 2


def test_the_place_is_asked_for_after_an_error_only():
    def refuse() -> str:
        raise AssertionError

    with naming_lost_peers(0, 2, refuse, TIMEOUT):
        pass
    with pytest.raises(RuntimeError, match=r"^no$"), naming_lost_peers(0, 2, refuse, TIMEOUT):
        raise RuntimeError("no")


def kill(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(rank: int) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def train(rank: int, path: Path, fail: Callable[[int], None], timeout: timedelta) -> None:
    """Reduce at three steps; rank 1 fails before the last one."""
    store = dist.FileStore(f"{path}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timeout)
    step = 0
    naming = naming_lost_peers(rank, 2, lambda: f"step {step}, backward", timeout)
    try:
        for step in range(3):  # the place reads it
            if rank == 1 and step == 2:
                fail(rank)
            with naming:
                dist.all_reduce(torch.ones(2))
    except LostPeerError as error:
        (path / "error").write_text(str(error))
        raise SystemExit(3) from error


def run_two(*args: object) -> float:
    """Run both ranks until rank 0 has ended; returns for how many seconds it ran."""
    fork = mp.get_context("fork")
    ranks = [fork.Process(target=train, args=(rank, *args)) for rank in range(2)]
    started = time.monotonic()
    for process in ranks:
        process.start()
    ranks[0].join(60)
    took = time.monotonic() - started
    ranks[1].kill()
    ranks[1].join()
    assert ranks[0].exitcode == 3
    return took


@pytest.mark.distributed
def test_a_killed_rank_is_named_at_once(tmp_path: Path):
    assert run_two(tmp_path, kill, timedelta(minutes=30)) < 20  # seconds, of half an hour
    here = f"Rank 0 of 2 on {socket.gethostname()}, step 2, backward, lost a process on "
    assert (tmp_path / "error").read_text().startswith(here)


@pytest.mark.distributed
def test_a_rank_that_hangs_is_named_after_the_timeout(tmp_path: Path):
    run_two(tmp_path, stop, TIMEOUT)
    here = f"Rank 0 of 2 on {socket.gethostname()}, step 2, backward, waited 3 s for another rank"
    assert (tmp_path / "error").read_text().startswith(here)
