"""Files and folders that take another's place: whole at every moment, also for a process that is killed."""

import errno
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_vram.techniques.sharded_checkpoints import folder
from lightning_vram.techniques.sharded_checkpoints.folder import (
    delete_leftovers,
    naming_disk_errors,
    publish,
    recover,
    remove,
    temporary_path,
)


def make_file(path: Path, text: str) -> None:
    path.write_text(text)


def make_folder(path: Path, text: str) -> None:
    (path / "inner").mkdir(parents=True)
    (path / "inner" / "data").write_text(text)


def read(path: Path) -> str:
    return (path / "inner" / "data" if path.is_dir() else path).read_text()


MAKERS = pytest.mark.parametrize("make", [make_file, make_folder])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "hpc_ckpt_3.ckpt"


def forbid_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "_exchange", lambda one, other: False)


@MAKERS
@pytest.mark.parametrize("make_other", [make_file, make_folder])
@pytest.mark.parametrize("can_exchange", [True, False], ids=["exchange", "two renames"])
def test_the_new_takes_the_place_of_the_old(path, make, make_other, can_exchange, monkeypatch):
    if not can_exchange:
        forbid_exchange(monkeypatch)
    for maker, text in [(make, "first"), (make_other, "second"), (make, "third")]:
        maker(temporary_path(path), text)
        publish(temporary_path(path), path)
        assert read(path) == text
        assert list(path.parent.iterdir()) == [path]


@MAKERS
def test_removing_leaves_nothing(path, make):
    make(path, "old")
    make(temporary_path(path), "half")
    remove(path)
    remove(path)
    assert list(path.parent.iterdir()) == []


def kill_at_call(monkeypatch: pytest.MonkeyPatch, owner: object, name: str, call: int) -> None:
    """Let the ``call``-th call kill the process after it is done."""
    real, calls = getattr(owner, name), []

    def count(*arguments: object, **options: object) -> object:
        result = real(*arguments, **options)
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    monkeypatch.setattr(owner, name, count)


def is_killed(work: Callable[[], None]) -> bool:
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join()
    return process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("owner", "name", "call", "can_exchange", "survivor"),
    [
        (os, "fsync", 1, True, "old"),  # while it is written to the disk
        (os, "fsync", 3, True, "old"),
        (folder, "_exchange", 1, True, "new"),
        (os, "rename", 1, False, "old"),  # between the two renames
        (os, "rename", 2, False, "new"),
        (folder, "delete", 1, False, "old"),
        (folder, "delete", 2, False, "new"),
    ],
)
def test_a_process_that_is_killed_leaves_the_old_or_the_new(
    path, owner, name, call, can_exchange, survivor, monkeypatch
):
    make_folder(path, "old")
    make_folder(temporary_path(path), "new")

    def work() -> None:
        if not can_exchange:
            forbid_exchange(monkeypatch)
        kill_at_call(monkeypatch, owner, name, call)
        publish(temporary_path(path), path)

    assert is_killed(work)
    recover(path)
    recover(path)
    assert read(path) == survivor
    delete_leftovers(path)
    assert list(path.parent.iterdir()) == [path]


def test_a_process_that_is_killed_while_it_removes_leaves_no_half(path, monkeypatch):
    make_folder(path, "old")

    def work() -> None:
        kill_at_call(monkeypatch, os, "rename", 1)
        remove(path)

    assert is_killed(work)
    recover(path)
    assert not path.exists()
    delete_leftovers(path)
    assert list(path.parent.iterdir()) == []


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the /dev/full of Linux")
def test_on_a_full_disk_torch_says_what_the_disk_says():
    with (
        Path("/dev/full").open("wb", buffering=0) as file,
        pytest.raises(OSError, match="No space left on device") as caught,
        naming_disk_errors(),
    ):
        torch.save({"a": torch.zeros(1000)}, file)
    assert caught.value.errno == errno.ENOSPC
