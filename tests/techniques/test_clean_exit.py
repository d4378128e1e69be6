"""What is done before Python ends."""

import multiprocessing
import signal
import subprocess
import sys

import pytest
import torch.distributed as dist

from lightning_vram.techniques import clean_exit
from lightning_vram.techniques.clean_exit import end_cleanly, leave_group, leave_group_at_exit


@pytest.fixture
def at_exit(monkeypatch):
    """What would run when Python ends, the last first."""
    waiting = []
    monkeypatch.setattr(clean_exit.atexit, "register", waiting.append)
    monkeypatch.setattr(clean_exit.atexit, "unregister", lambda f: f in waiting and waiting.remove(f))
    monkeypatch.setattr(clean_exit, "_SETTLE_SECONDS", 0)
    return waiting


def connect() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_a_group_is_left_at_exit(at_exit):
    leave_group_at_exit()
    leave_group_at_exit()
    assert len(at_exit) == 1
    connect()
    at_exit[0]()
    assert not dist.is_initialized()
    assert at_exit == []


def test_no_group_is_no_error(at_exit):
    leave_group_at_exit()
    at_exit[0]()
    leave_group()


def test_a_group_may_be_left_earlier(at_exit):
    connect()
    leave_group_at_exit()
    leave_group()
    assert not dist.is_initialized()
    assert at_exit == []


def wait() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    while True:
        signal.pause()


def test_daemons_are_killed_before_the_group_is_left(at_exit):
    context = multiprocessing.get_context("fork")
    daemon = context.Process(target=wait, daemon=True)
    daemon.start()
    end_cleanly()
    end_cleanly()
    assert len(at_exit) == 2
    at_exit[-1]()
    daemon.join(10)
    assert daemon.exitcode == -signal.SIGKILL


DEAF = """
import importlib.util, multiprocessing, os, signal, sys

spec = importlib.util.spec_from_file_location("clean_exit", sys.argv[1])
clean_exit = importlib.util.module_from_spec(spec)
spec.loader.exec_module(clean_exit)
signal.signal(signal.SIGTERM, lambda *unused: None)

def wait():
    print("up", flush=True)
    while True:
        signal.pause()

multiprocessing.get_context("fork").Process(target=wait, daemon=True).start()
if sys.argv[2] == "cleanly":
    clean_exit.end_cleanly()
sys.exit(7)
"""


def test_python_ends_with_children_that_do_not_heed_sigterm():
    run = [sys.executable, "-c", DEAF, clean_exit.__file__, "cleanly"]
    ended = subprocess.run(run, timeout=60, capture_output=True, check=False, text=True)
    assert ended.returncode == 7, ended.stderr
