"""What is done before Python ends."""

import pytest
import torch.distributed as dist

from lightning_vram.core import processes
from lightning_vram.core.processes import leave_group, leave_group_at_exit


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
