"""What a job says about itself, and which ones are refused."""

import subprocess

import pytest
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support.requeue_runs import JOB_ID, TASK

from lightning_vram.callbacks.slurm_requeue import job as slurm_job
from lightning_vram.callbacks.slurm_requeue.job import SlurmJob, check_job


def job(**changes: str) -> SlurmJob:
    found = SlurmJob.from_environment({**TASK, **changes})
    assert found is not None
    return found


def test_a_job_is_read_from_variables():
    assert job(SLURM_RESTART_COUNT="2", SLURM_NTASKS="4", SLURM_NNODES="2") == SlurmJob(
        "17", "train", 2, 4, 2, True, "0"
    )
    assert SlurmJob.from_environment({"SLURM_JOB_ID": "3"}) == SlurmJob("3", "", 0, 1, 1, False)
    assert SlurmJob.from_environment({}) is None


def test_an_element_of_an_array_has_its_own_number():
    assert job(SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="2").job_id == "7_2"


REQUEUED = (0, f"job {JOB_ID} is requeued")
CANCELLED = (1, f"job {JOB_ID} was cancelled and is not requeued")
HAS_BEEN = (0, f"job {JOB_ID} has been requeued")


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("JobId=17 JobState=RUNNING Restarts=1 Reason=None", REQUEUED),
        ("JobId=17 JobState=COMPLETING Restarts=1 Reason=None", CANCELLED),
        ("JobId=17 JobState=CANCELLED Restarts=1 Reason=None", CANCELLED),
        ("JobId=17 JobState=COMPLETING Restarts=1 Reason=TimeLimit", REQUEUED),
        ("JobId=17 JobState=COMPLETING Restarts=2 Reason=BeginTime", HAS_BEEN),
        ("JobId=17 JobState=PENDING Restarts=2 Comment=a=b", HAS_BEEN),
        ("", REQUEUED),
    ],
)
def test_the_job_is_requeued_unless_the_controller_says_otherwise(answer, outcome, slurm):
    slurm.answer(answer)
    assert job(SLURM_RESTART_COUNT="1").requeue() == outcome
    assert slurm.asked == [f"show job --oneliner {JOB_ID}", f"requeue {JOB_ID}"][: 1 + (outcome == REQUEUED)]


@pytest.mark.parametrize(("error", "why"), [("  disabled ", "disabled"), ("", "scontrol ended with 3")])
def test_a_request_that_is_refused_says_why(error, why, slurm):
    slurm.answer("", error, 3)
    assert job().requeue() == (1, f"job {JOB_ID} could not be requeued ({why}): submit it again")


def test_a_controller_that_does_not_answer_is_given_up(monkeypatch):
    def run(command, *, timeout, **options):
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(slurm_job.subprocess, "run", run)
    assert "Command '['scontrol', 'requeue', '17']' timed out after 120.0 seconds" in job().requeue()[1]


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_a_name_that_keeps_tasks_from_connecting_is_refused(name):
    message = (
        rf"^The SLURM job is named '{name}': Lightning treats such a job as an interactive session, and its 2 "
        rf"tasks would not connect\. Rename it: '#SBATCH --job-name=train'\.$"
    )
    with pytest.raises(MisconfigurationException, match=message):
        check_job(job(SLURM_NTASKS="2", SLURM_JOB_NAME=name))


def test_tasks_without_srun_are_refused():
    message = (
        r"^The SLURM job has 2 tasks, and this process was not started by srun: it would wait for the others\. Put "
        r"'srun' before the command in the batch script: 'srun python train\.py'\.$"
    )
    with pytest.raises(MisconfigurationException, match=message):
        check_job(SlurmJob("17", "train", 0, 2, 1, is_step=False))


@pytest.mark.parametrize(
    "fine",
    [
        None,
        SlurmJob("17", "train", 0, 2, 1, is_step=True),
        SlurmJob("17", "bash", 0, 1, 1, is_step=True),
        SlurmJob("17", "train", 0, 1, 1, is_step=False),
        SlurmJob("17", "interactive", 0, 2, 1, is_step=False),  # a session, in which Lightning starts processes
    ],
)
def test_other_jobs_are_fine(fine):
    check_job(fine)


@pytest.mark.parametrize("launcher", ["TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE", "SLURM_PTY_PORT"])
def test_who_else_starts_processes_is_left_alone(launcher, monkeypatch):
    without_srun = SlurmJob("17", "train", 0, 8, 2, False)
    with pytest.raises(MisconfigurationException):
        check_job(without_srun)
    monkeypatch.setenv(launcher, "1")
    check_job(without_srun)
    check_job(SlurmJob("17", "bash", 0, 8, 2, True, "0"))
