"""The SLURM job that this process is a task of: its folder, how it stops, and how it starts again."""

import math
import os
import pickle
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_vram.callbacks.slurm_requeue.exact_resume import ExactResume
from lightning_vram.core.ranks import RankAgreement
from lightning_vram.private_names.lightning import last_checkpoints

_INTERACTIVE = ("bash", "interactive")  # names of jobs that Lightning takes for sessions, whose tasks do not connect
# Who else starts processes in a job: torchrun, MPI; and a terminal, in which one tries things.
_OTHER_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_PTY_PORT")
_PATIENCE_SECONDS = 120.0  # a controller that is being restarted answers later


@dataclass(frozen=True)
class SlurmJob:
    """The job, as its environment variables describe it."""

    job_id: str  # of an element of an array ``7_2``, for one of its elements has the number of the array
    name: str
    restart_count: int  # how often it has been requeued
    num_tasks: int  # of the step, or of the job where there is no step
    num_nodes: int  # as ``num_tasks``
    is_step: bool  # whether ``srun`` started this process
    step_id: str = "batch"

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> "SlurmJob | None":
        """Read the variables that SLURM sets; ``None`` outside of a job."""
        job_id = environment.get("SLURM_JOB_ID")
        if job_id is None:
            return None
        if "SLURM_ARRAY_JOB_ID" in environment:
            job_id = f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
        return SlurmJob(
            job_id=job_id,
            name=environment.get("SLURM_JOB_NAME", ""),
            restart_count=int(environment.get("SLURM_RESTART_COUNT", "0")),
            num_tasks=int(environment.get("SLURM_STEP_NUM_TASKS", environment.get("SLURM_NTASKS", "1"))),
            num_nodes=int(environment.get("SLURM_STEP_NUM_NODES", environment.get("SLURM_NNODES", "1"))),
            is_step="SLURM_STEP_ID" in environment,
            step_id=environment.get("SLURM_STEP_ID", "batch"),
        )

    def requeue(self) -> tuple[int, str]:
        """Requeue the job, which ends all tasks, unless it was cancelled. Returns an exit code and a message."""
        # If the controller does not answer, the job counts as running.
        answer = _scontrol("show", "job", "--oneliner", self.job_id)
        fields = dict(word.partition("=")[::2] for word in answer.stdout.split())
        if int(fields.get("Restarts", "0")) > self.restart_count:  # by another process
            return 0, f"job {self.job_id} has been requeued"
        # The state of a job that is being ended says no more than that; the reason is given for a time limit only.
        if fields.get("JobState") in ("COMPLETING", "CANCELLED") and fields.get("Reason") != "TimeLimit":
            return 1, f"job {self.job_id} was cancelled and is not requeued"
        answer = _scontrol("requeue", self.job_id)
        if answer.returncode != 0:
            why = answer.stderr.strip() or f"scontrol ended with {answer.returncode}"
            return 1, f"job {self.job_id} could not be requeued ({why}): submit it again"
        return 0, f"job {self.job_id} is requeued"


def check_job(job: SlurmJob | None) -> None:
    """Refuse a job whose tasks would not find each other, before they wait for each other; ``None``: no job."""
    if job is None or job.num_tasks <= 1 or any(name in os.environ for name in _OTHER_LAUNCHERS):
        return
    if job.name in _INTERACTIVE and job.is_step:
        raise MisconfigurationException(
            f"The SLURM job is named {job.name!r}: Lightning treats such a job as an interactive session, and its "
            f"{job.num_tasks} tasks would not connect. Rename it: '#SBATCH --job-name=train'."
        )
    if not job.is_step and job.name not in _INTERACTIVE:
        raise MisconfigurationException(
            f"The SLURM job has {job.num_tasks} tasks, and this process was not started by srun: it would wait for the "
            "others. Put 'srun' before the command in the batch script: 'srun python train.py'."
        )


def check_tasks(environment: object, num_devices: int, num_nodes: int) -> None:
    """Refuse a step with more or fewer tasks than the Trainer has processes, unless something else counts them."""
    job = SlurmJob.from_environment()
    if job is None or not isinstance(environment, SLURMEnvironment) or job.num_tasks == num_devices * num_nodes:
        return
    raise MisconfigurationException(
        f"SLURM started {job.num_tasks} tasks on {job.num_nodes} nodes, and the Trainer has devices={num_devices} and "
        f"num_nodes={num_nodes}. Set '#SBATCH --nodes={num_nodes}' and '#SBATCH --ntasks-per-node={num_devices}', or "
        f"Trainer(devices={max(1, job.num_tasks // job.num_nodes)}, num_nodes={job.num_nodes})."
    )


def _scontrol(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = ["scontrol", *arguments]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(command, 1, "", str(error))


_FOR_THIS_USER = 0o700
_FOR_OTHERS = 0o077
_WAY_OUT = "Give a folder that all nodes share: SlurmRequeue(dirpath=...), or the trainer's default_root_dir."


class RequeueFolder:
    """The folder of one program of a job. All methods but ``is_open`` are for one rank."""

    # It is named by job and step, so that another run in the same folder does not start from a checkpoint of this one.
    # It is made for this user alone: no other user can have written what is in there.

    def __init__(self, root: Path, job: SlurmJob) -> None:
        self.job = job
        self.path = root / "slurm_requeue" / job.job_id / f"step-{job.step_id}"
        self.checkpoint = self.path / "fit.ckpt"  # where the fit was stopped, or has ended
        self.part = self.path / "fit.part"  # a checkpoint that is being written
        self._started = self.path / "fit.started"  # empty; its time is when the job first came to the fit

    @property
    def is_open(self) -> bool:
        """Whether this process sees it."""
        try:
            return self._started.exists()
        except OSError:  # of a network file system
            return False

    def try_open(self) -> str:
        """Make it, and record when the job first came to the fit; returns why it cannot be written, or ``""``."""
        of_job = self.path.parent
        try:
            of_job.parent.mkdir(parents=True, exist_ok=True)
            for folder in (of_job, self.path):
                folder.mkdir(mode=_FOR_THIS_USER, exist_ok=True)
            if self.job.restart_count == 0:  # what is there is of another job that had this number
                _remove(self._started)
                _remove(self.checkpoint)
                for folder in (of_job, self.path):
                    with suppress(OSError):  # of another user, or a file system without modes
                        folder.chmod(_FOR_THIS_USER)
            self._started.open("a").close()  # its time is that of the first
            _remove(self.part)
        except OSError as error:
            return str(error)
        return ""

    def is_private(self) -> bool:
        """Whether no other user can have written here."""
        with tempfile.TemporaryFile(dir=self.path) as file:
            own = os.fstat(file.fileno()).st_uid  # on this file system, which may be another than in this process
        found = [folder.stat() for folder in (self.path.parent, self.path)]
        return all(each.st_uid == own and not each.st_mode & _FOR_OTHERS for each in found)

    def newest(self, others: Iterable[Path]) -> Path | None:
        """The newest of the job's checkpoint and ``others`` that the job may have written."""
        since = _time(self._started, 0.0)
        written = {path: _time(path, -math.inf) for path in (self.checkpoint, *others)}
        return max((path for path in written if written[path] >= since), key=lambda path: written[path], default=None)

    def publish(self) -> None:
        """Replace the checkpoint by what was written."""
        old = self.checkpoint.with_suffix(".old")
        if self.checkpoint.is_dir():  # which cannot be replaced
            self.checkpoint.replace(old)
        self.part.replace(self.checkpoint)
        _remove(old)

    def touch(self) -> None:
        """Let the checkpoint be the newest."""
        if self.checkpoint.exists():
            self.checkpoint.touch()

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


def open_folder(
    trainer: pl.Trainer, agreement: RankAgreement, dirpath: str | Path | None, job: SlurmJob
) -> RequeueFolder:
    """Make the folder of the job, and check that every rank sees it. A collective: all ranks raise, or none."""
    root = str(trainer.default_root_dir if dirpath is None else dirpath)
    if "://" in root:
        raise MisconfigurationException(
            f"SlurmRequeue needs a folder that all nodes share, got default_root_dir={root!r}. "
            "Give it one: SlurmRequeue(dirpath=...)."
        )
    folder = RequeueFolder(Path(root).absolute(), job)
    error = trainer.strategy.broadcast(folder.try_open() if trainer.is_global_zero else "")
    if error:
        raise MisconfigurationException(f"SlurmRequeue cannot write to {str(folder.path)!r}: {error}. {_WAY_OUT}")
    (blind,) = agreement.largest(-1 if folder.is_open else trainer.global_rank)
    if blind >= 0:
        raise MisconfigurationException(
            f"SlurmRequeue cannot use {str(folder.path)!r}: rank {blind} does not see what rank 0 has made there. "
            + _WAY_OUT
        )
    return folder


def save_together(trainer: pl.Trainer, folder: RequeueFolder, resume: ExactResume) -> None:
    """Save between two batches, within a validation, or at the end; a collective. Waits for asynchronous saves."""
    val_progress = trainer.fit_loop.epoch_loop.val_loop.batch_progress
    saved = val_progress.state_dict()
    resume.repeats_validation = trainer.validating
    if trainer.validating:  # so that Lightning runs it again, from its first batch
        val_progress.reset()
        val_progress.total.ready = val_progress.total.started = 1  # type: ignore[attr-defined]
    try:
        trainer.save_checkpoint(folder.part, weights_only=False)
    finally:
        resume.repeats_validation = False
        val_progress.load_state_dict(saved)
    finish = getattr(trainer.strategy, "wait_for_checkpoints", None)
    trainer.strategy.checkpoint_io.teardown() if finish is None else finish()
    trainer.strategy.barrier("SlurmRequeue.save")
    if trainer.is_global_zero:
        folder.publish()


def resume_fit(
    trainer: pl.Trainer,
    folder: RequeueFolder,
    start: Callable[..., None],
    checkpoint_path: Any = None,
    *,
    tensors_only: bool | None,  # None: unless no other user can have written the file
    **options: Any,
) -> bool:
    """Resume from the job's newest checkpoint, if there is one; whether it is our own. All ranks raise, or none."""
    newest: Path | None = None
    is_private = False
    if trainer.is_global_zero and folder.job.restart_count > 0:
        savers = [one for one in trainer.callbacks if isinstance(one, ModelCheckpoint)]  # type: ignore[attr-defined]
        paths = [path for saver in savers for path in last_checkpoints(saver, trainer)]  # of save_last=True
        newest = folder.newest(map(Path, paths if checkpoint_path is None else [*paths, checkpoint_path]))
        is_private = folder.is_private()
    newest, is_private = trainer.strategy.broadcast((newest, is_private))
    if newest is None:
        start(checkpoint_path, **options)
        return False
    rank_zero_info(f"SlurmRequeue: restart {folder.job.restart_count} of job {folder.job.job_id}.")
    if newest == folder.checkpoint:
        options["weights_only"] = not is_private if tensors_only is None else tensors_only
    elif tensors_only is False:
        options["weights_only"] = False
    try:
        start(str(newest), **options)
    except pickle.UnpicklingError as error:
        raise pickle.UnpicklingError(
            f"SlurmRequeue does not load {str(newest)!r}: it contains more than tensors and basic types, and "
            "other users may have written it. If you trust it: SlurmRequeue(weights_only=False), or allow its "
            "classes with torch.serialization.add_safe_globals."
        ) from error
    return newest == folder.checkpoint
