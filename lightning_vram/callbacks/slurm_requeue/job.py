"""The SLURM job that this process is a task of: its folder, how it stops, and how it starts again."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.exceptions import MisconfigurationException

_INTERACTIVE = ("bash", "interactive")  # names of jobs that Lightning takes for sessions, whose tasks do not connect
# Who else starts processes in a job: torchrun, MPI; and a terminal, in which one tries things.
_OTHER_LAUNCHERS = ("TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_PTY_PORT")
_PATIENCE_SECONDS = 120.0  # a controller that is being restarted answers later


class Fate(Enum):
    """What happens to a job whose tasks have got SIGTERM."""

    OPEN = "open"  # preempted, or out of time
    CANCELLED = "cancelled"  # a request to requeue would undo it
    REQUEUED = "requeued"  # by another process


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

    def fate(self) -> Fate:
        """Ask the controller why it has sent SIGTERM. If it does not answer, the job counts as running."""
        answer = _scontrol("show", "job", "--oneliner", self.job_id)
        fields = dict(word.partition("=")[::2] for word in answer.stdout.split())
        if int(fields.get("Restarts", "0")) > self.restart_count:
            return Fate.REQUEUED
        # The state of a job that is being ended says no more than that; the reason is given for a time limit only.
        is_ending = fields.get("JobState", "") in ("COMPLETING", "CANCELLED")
        return Fate.CANCELLED if is_ending and fields.get("Reason") != "TimeLimit" else Fate.OPEN

    def requeue(self) -> str:
        """Ask the controller to requeue the job, which ends all tasks; returns why not, or ``""``."""
        answer = _scontrol("requeue", self.job_id)
        return "" if answer.returncode == 0 else answer.stderr.strip() or f"scontrol ended with {answer.returncode}"


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
