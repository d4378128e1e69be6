"""Where a job that SLURM requeues leaves what it goes on from: ``slurm_requeue/<job>/`` in a folder of the run.

By job, so that another run in the same folder does not start from a checkpoint that was none of its own; removed once
the fit has ended.
"""

import shutil
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

_STARTED = "started"


class RequeueFolder:
    """The folder of one job.

    Args:
        root: Of the run, on a file system that all nodes share.
        job_id: Number of the job.
        fit: Which fit of the program it is, from 1: a program that fits twice has two checkpoints.
    """

    def __init__(self, root: Path, job_id: str, fit: int) -> None:
        self.path = root / "slurm_requeue" / job_id
        self.checkpoint = self.path / f"fit-{fit}.ckpt"

    @property
    def is_open(self) -> bool:
        """Whether this process sees it."""
        return (self.path / _STARTED).exists()

    def try_open(self) -> str:
        """Make it, and note when the job first came here. For one rank.

        Returns:
            Why it cannot be written; ``""`` if it can.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / _STARTED).open("a").close()  # its time is that of the first
        except OSError as error:
            return str(error)
        return ""

    def newest(self, others: Iterable[Path]) -> Path | None:
        """Choose what to go on from.

        Args:
            others: Checkpoints that the fit may have written, too, as ``ModelCheckpoint`` does.

        Returns:
            The newest of this job; ``None`` if there is none.
        """
        started = self.path / _STARTED
        since = started.stat().st_mtime if started.exists() else 0.0
        written = {path: path.stat().st_mtime for path in (self.checkpoint, *others) if path.exists()}
        of_job = {path: when for path, when in written.items() if when >= since}
        return max(of_job, key=lambda path: of_job[path], default=None)

    def remove(self) -> None:
        """Remove the checkpoint, and the folder if nothing else is in there. For one rank."""
        if self.checkpoint.is_dir():
            shutil.rmtree(self.checkpoint, ignore_errors=True)
        self.checkpoint.unlink(missing_ok=True)
        if self.path.is_dir() and all(child.name == _STARTED for child in self.path.iterdir()):
            shutil.rmtree(self.path, ignore_errors=True)
            with suppress(OSError):  # other jobs have theirs in there
                self.path.parent.rmdir()
