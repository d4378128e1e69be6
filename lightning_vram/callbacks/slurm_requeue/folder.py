"""Where a job that SLURM requeues saves its checkpoint: ``slurm_requeue/<job>/step-<n>/`` in the run's folder."""

import math
import os
import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_FOR_THIS_USER = 0o700
_FOR_OTHERS = 0o077


class RequeueFolder:
    """The folder of one program of a job. All methods but ``is_open`` are for one rank."""

    # It is named by job and step, so that another run in the same folder does not start from a checkpoint of this one.
    # It is made for this user alone: no other user can have written what is in there.

    def __init__(self, root: Path, job_id: str, step_id: str, fit: int) -> None:  # fit: from 1, one per trainer.fit
        self.path = root / "slurm_requeue" / job_id / f"step-{step_id}"
        self.checkpoint = self.path / f"fit-{fit}.ckpt"  # where it was stopped
        self.ended = self.path / f"fit-{fit}.ended"  # the checkpoint of its end
        self.part = self.path / f"fit-{fit}.part"  # a checkpoint that is being written
        self._started = self.path / f"fit-{fit}.started"  # empty; its time is when the job first came to this fit
        self._next_started = self.path / f"fit-{fit + 1}.started"

    @property
    def is_open(self) -> bool:
        """Whether this process sees it."""
        try:
            return self._started.exists()
        except OSError:  # of a network file system
            return False

    def try_open(self, restart_count: int) -> str:
        """Make it, and record when the job first came to this fit; returns why it cannot be written, or ``""``."""
        job = self.path.parent
        try:
            job.parent.mkdir(parents=True, exist_ok=True)
            for folder in (job, self.path):
                folder.mkdir(mode=_FOR_THIS_USER, exist_ok=True)
            if restart_count == 0:  # what is there is of another job that had this number
                for old in (self._started, self.checkpoint, self.ended):
                    _remove(old)
                for folder in (job, self.path):
                    with suppress(OSError):  # of another user, or a file system without modes
                        folder.chmod(_FOR_THIS_USER)
            self._started.open("a").close()  # its time is that of the first
            _remove(self.part)
        except OSError as error:
            return str(error)
        return ""

    def foreign_owner(self, path: Path) -> int | None:
        """The number of another user who owns checkpoint ``path`` of this folder; ``None`` if this user does."""
        owner = path.lstat().st_uid
        return None if owner == self._own_uid() else owner

    def is_private(self) -> bool:
        """Whether no other user can have written here."""
        own = self._own_uid()
        found = [folder.stat() for folder in (self.path.parent, self.path)]
        return all(each.st_uid == own and not each.st_mode & _FOR_OTHERS for each in found)

    def _own_uid(self) -> int:
        """Of this user on this file system, which may be another than in this process."""
        with tempfile.TemporaryFile(dir=self.path) as file:
            return os.fstat(file.fileno()).st_uid

    def newest(self, others: Iterable[Path]) -> Path | None:
        """The end of the fit, or the newest of the job's checkpoint and ``others`` that the fit may have written."""
        if self.ended.exists():
            return self.ended
        since = _time(self._started, 0.0)
        until = _time(self._next_started, math.inf)  # an earlier start of the job has been further
        written = {path: _time(path, -math.inf) for path in (self.checkpoint, *others)}
        of_fit = {path: when for path, when in written.items() if since <= when <= until}
        return max(of_fit, key=lambda path: of_fit[path], default=None)

    def publish(self) -> None:
        """Replace the checkpoint by what was written."""
        old = self.checkpoint.with_suffix(".old")
        if self.checkpoint.is_dir():  # which cannot be replaced
            self.checkpoint.replace(old)
        self.part.replace(self.checkpoint)
        _remove(old)
        _remove(self.ended)  # it was given more to do

    def publish_end(self) -> None:
        """Let what was written be the end of the fit."""
        _remove(self.ended)
        self.part.replace(self.ended)
        self.remove_checkpoint()

    def touch(self) -> None:
        """Let the checkpoint be the newest."""
        if self.checkpoint.exists():
            self.checkpoint.touch()

    def remove_checkpoint(self) -> None:
        """Remove it for a fit that does not need it any more; the record that the job was here stays."""
        _remove(self.checkpoint)

    def remove(self) -> None:
        """Remove all of this program, when it has ended."""
        shutil.rmtree(self.path, ignore_errors=True)
        for folder in (self.path.parent, self.path.parent.parent):
            with suppress(OSError):  # other programs and jobs have theirs in there
                folder.rmdir()


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _time(path: Path, missing: float) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return missing
