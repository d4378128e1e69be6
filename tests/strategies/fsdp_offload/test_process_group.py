"""The process group: made once, gone at exit, and made again after a restart."""

import os
import socket
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from support.ports import find_free_port

from lightning_vram.core import processes
from lightning_vram.core.ranks import LostPeerError
from lightning_vram.strategies.fsdp_offload.base import connect, default_backend

CPU = torch.device("cpu")
SHORT = timedelta(seconds=1)
LONG = timedelta(seconds=60)
ADDRESS = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE")


class Environment(LightningEnvironment):
    """Rank ``rank`` of ``world_size``, which meet at ``port``."""

    def __init__(self, rank: int, world_size: int, port: int) -> None:
        super().__init__()
        self.set_global_rank(rank)
        self.set_world_size(world_size)
        self._main_port = port

    @property
    def main_address(self) -> str:
        return "127.0.0.1"


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free one; what connecting writes into the environment is taken back."""
    for name in ADDRESS:
        monkeypatch.setenv(name, "")
    return find_free_port()


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What would run when Python ends."""
    waiting: list[Callable[[], None]] = []
    monkeypatch.setattr(processes.atexit, "register", waiting.append)
    monkeypatch.setattr(processes.atexit, "unregister", lambda f: f in waiting and waiting.remove(f))
    return waiting


@pytest.mark.parametrize(
    ("device", "backend"), [("cpu", "gloo"), ("cuda:3", "cpu:gloo,cuda:nccl"), ("xpu", "cpu:gloo,xpu:xccl")]
)
def test_the_host_is_always_reached_over_gloo(device: str, backend: str):
    assert default_backend(torch.device(device)) == backend


def test_the_group_is_made_once_and_destroyed_at_exit(port: int, at_exit: list[Callable[[], None]]):
    connect(Environment(0, 1, port), "gloo", timeout=LONG, device=CPU)
    assert (dist.get_backend(), dist.get_world_size(), dist.get_rank()) == ("gloo", 1, 0)
    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("127.0.0.1", str(port))
    assert len(at_exit) == 1
    connect(Environment(1, 2, port), "nccl", timeout=SHORT, device=CPU)
    assert dist.get_world_size() == 1
    assert len(at_exit) == 1
    at_exit[0]()
    assert not dist.is_initialized()
    assert at_exit == []


def test_a_group_of_the_users_own_stays_theirs(one_rank: None, at_exit: list[Callable[[], None]]):
    connect(Environment(0, 2, 1), "gloo", timeout=SHORT, device=CPU)
    assert dist.get_world_size() == 1
    assert at_exit == []


def test_a_rank_that_never_comes_is_an_error_after_the_timeout(port: int):
    message = rf"^Rank 0 of 2 on {socket.gethostname()}, making the process group, lost another rank: Timed out after "
    with pytest.raises(LostPeerError, match=message):
        connect(Environment(0, 2, port), "gloo", timeout=SHORT, device=CPU)
    assert not dist.is_initialized()
