"""Where the checkpoint lies, and which one is the newest of the job."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_vram.callbacks.slurm_requeue.job import RequeueFolder, SlurmJob

JOB = SlurmJob("17", "train", 1, 1, 1, is_step=True, step_id="0")


def make_folder(root: Path, job: SlurmJob = JOB, **changes: object) -> RequeueFolder:
    return RequeueFolder(root, replace(job, **changes))


@pytest.fixture
def folder(tmp_path: Path) -> RequeueFolder:
    folder = make_folder(tmp_path / "runs", JOB)
    assert folder.try_open() == ""
    return folder


def write(path: Path, when: float) -> Path:
    path.touch()
    os.utime(path, (when, when))
    return path


def test_a_job_has_a_folder_and_a_fit_a_file(tmp_path):
    folder = make_folder(tmp_path, job_id="7_2")
    assert folder.checkpoint == tmp_path / "slurm_requeue" / "7_2" / "step-0" / "fit.ckpt"
    assert not folder.is_open
    assert folder.newest([]) is None
    folder.remove()


def test_at_the_first_start_nothing_is_there(folder, tmp_path):
    for path in (folder.path / "fit.started", folder.checkpoint):
        write(path, 100.0)
    first = make_folder(tmp_path / "runs", restart_count=0)
    assert first.try_open() == ""
    assert [path.name for path in folder.path.iterdir()] == ["fit.started"]
    assert (folder.path / "fit.started").stat().st_mtime > 100.0


def test_the_folder_of_a_job_is_for_this_user_alone(folder, tmp_path):
    assert folder.is_private()
    assert [each.stat().st_mode & 0o777 for each in (folder.path.parent, folder.path)] == [0o700, 0o700]
    for each in (folder.path.parent, folder.path):
        each.chmod(0o770)
        assert not folder.is_private()
        assert folder.try_open() == ""  # a restart does not make it so: something may lie there
        assert not folder.is_private()
        assert make_folder(tmp_path / "runs", restart_count=0).try_open() == ""
        assert folder.is_private()


def test_the_newest_is_that_of_the_latest_time(folder, tmp_path):
    write(folder.path / "fit.started", 100.0)
    other, missing = write(tmp_path / "last.ckpt", 102.0), tmp_path / "missing.ckpt"
    assert folder.newest([missing]) is None
    assert folder.newest([other, missing]) == other
    assert folder.newest([write(tmp_path / "older than the job.ckpt", 99.0)]) is None
    write(folder.checkpoint, 101.0)
    assert folder.newest([other]) == other
    write(folder.checkpoint, 103.0)
    assert folder.newest([other]) == folder.checkpoint


def test_what_others_have_there_stays(folder, tmp_path):
    of_other_step = make_folder(tmp_path / "runs", step_id="1")
    of_other_job = make_folder(tmp_path / "runs", job_id="18")
    assert of_other_step.try_open() == of_other_job.try_open() == ""
    folder.checkpoint.touch()
    folder.remove()
    assert not folder.path.exists()
    assert of_other_step.is_open
    assert of_other_job.is_open


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir], ids=["file", "folder"])
def test_what_was_written_takes_the_place_of_the_checkpoint(folder, make):
    for _ in range(2):
        make(folder.part)
        folder.publish()
        assert sorted(path.name for path in folder.path.iterdir()) == ["fit.ckpt", "fit.started"]
    assert folder.newest([]) == folder.checkpoint


@pytest.mark.parametrize("make", [Path.touch, Path.mkdir], ids=["file", "folder"])
def test_what_was_not_written_to_the_end_is_not_gone_on_from(folder, make):
    make(folder.part)
    assert folder.newest([]) is None
    assert folder.try_open() == ""
    assert not folder.part.exists()
