"""Where the checkpoint lies, and which one is the newest of the job."""

import os
from pathlib import Path

import pytest

from lightning_vram.callbacks.requeue_folder import RequeueFolder


@pytest.fixture
def folder(tmp_path: Path) -> RequeueFolder:
    folder = RequeueFolder(tmp_path / "runs", "17", 1)
    assert folder.try_open() == ""
    return folder


def write(path: Path, when: float) -> Path:
    path.touch()
    os.utime(path, (when, when))
    return path


def test_a_job_has_a_folder_and_a_fit_a_file(tmp_path):
    folder = RequeueFolder(tmp_path, "7_2", 3)
    assert folder.checkpoint == tmp_path / "slurm_requeue" / "7_2" / "fit-3.ckpt"
    assert not folder.is_open
    assert folder.newest([]) is None
    folder.remove()


def test_opening_again_keeps_the_time_of_the_first(folder):
    assert folder.is_open
    started = write(folder.path / "started", 100.0)
    assert folder.try_open() == ""
    assert started.stat().st_mtime == 100.0


def test_what_cannot_be_written_says_why(tmp_path):
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "slurm_requeue" / "17"
    assert RequeueFolder(tmp_path / "file", "17", 1).try_open() == f"[Errno 20] Not a directory: '{path}'"


def test_the_newest_is_that_of_the_latest_time(folder, tmp_path):
    write(folder.path / "started", 100.0)
    other, missing = write(tmp_path / "last.ckpt", 102.0), tmp_path / "missing.ckpt"
    assert folder.newest([missing]) is None
    assert folder.newest([other, missing]) == other
    write(folder.checkpoint, 101.0)
    assert folder.newest([other]) == other
    write(folder.checkpoint, 103.0)
    assert folder.newest([other]) == folder.checkpoint


def test_what_is_older_than_the_job_is_not_its_own(folder, tmp_path):
    write(folder.path / "started", 100.0)
    assert folder.newest([write(tmp_path / "last.ckpt", 99.0)]) is None


def test_all_is_removed(folder, tmp_path):
    folder.checkpoint.touch()
    folder.remove()
    assert list((tmp_path / "runs").iterdir()) == []
    folder.remove()


def test_a_checkpoint_may_be_a_folder(folder, tmp_path):
    folder.checkpoint.mkdir()
    (folder.checkpoint / "shard").touch()
    folder.remove()
    assert list((tmp_path / "runs").iterdir()) == []


def test_what_others_have_there_stays(folder, tmp_path):
    folder.checkpoint.touch()
    of_other_fit, of_other_job = RequeueFolder(tmp_path / "runs", "17", 2), RequeueFolder(tmp_path / "runs", "18", 1)
    of_other_fit.checkpoint.touch()
    of_other_job.try_open()
    folder.remove()
    assert not folder.checkpoint.exists()
    assert of_other_fit.checkpoint.exists()
    of_other_fit.remove()
    assert not of_other_fit.path.exists()
    assert of_other_job.is_open
