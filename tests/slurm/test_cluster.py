"""The cluster that other tests rely on, and what SLURM does on it that our code relies on. Jobs are bash alone."""

from pathlib import Path

import pytest
from slurm.cluster import Cluster, read_environments

WAIT = "while :; do sleep 0.1; done"  # a trap waits for the end of the command that runs


def write_job(folder: Path, *lines: str) -> Path:
    path = folder / "job.sh"
    path.write_text("\n".join(["#!/bin/bash", "#SBATCH --open-mode=append", *lines]) + "\n")
    return path


def write_task(folder: Path, *lines: str) -> str:
    """A script for srun, and the command that starts it."""
    path = folder / "task.sh"
    path.write_text("\n".join(lines) + "\n")
    return f"srun bash {path}"


def trap(who: str) -> str:
    return "; ".join(f"trap 'echo {who} got {name}' {name}" for name in ("USR1", "TERM"))


def processes_of(cluster: Cluster) -> list[int]:
    conf = str(cluster.configuration)
    return [process for process, variables in read_environments() if variables.get("SLURM_CONF") == conf]


def test_the_end_ends_jobs_daemons_and_folder(tmp_path):
    task = write_task(tmp_path, "trap '' TERM", "setsid sleep 61 & echo start", "sleep 61")
    with Cluster(num_nodes=1) as cluster:
        job = cluster.submit(write_job(tmp_path, task))
        cluster.wait_for_output(job, "start")
        assert processes_of(cluster)
    assert not processes_of(cluster)
    assert not cluster.folder.exists()


@pytest.mark.parametrize(("options", "receivers"), [((), {"task", "child", "session"}), (("--batch",), {"batch"})])
def test_a_signal_reaches_all_processes_of_a_step(cluster, tmp_path, options, receivers):
    """Children, such as workers of a DataLoader, get the signal that was meant for the task, wherever they are."""
    (tmp_path / "child.sh").write_text(f"{trap('child')}; echo ready child; {WAIT}")
    (tmp_path / "session.sh").write_text(f"{trap('session')}; echo ready session; {WAIT}")
    children = [f"bash {tmp_path}/child.sh &", f"setsid bash {tmp_path}/session.sh &"]
    task = write_task(tmp_path, trap("task"), *children, "echo ready task", WAIT)
    job = cluster.submit(write_job(tmp_path, trap("batch"), f"{task} &", "while :; do wait; done"))
    for who in ("child", "session", "task"):
        cluster.wait_for_output(job, f"ready {who}")
    cluster.signal(job, "USR1", *options)
    for who in receivers:
        cluster.wait_for_output(job, f"{who} got USR1")
    for who in {"batch", "child", "task", "session"} - receivers:
        assert f"{who} got" not in cluster.output(job)
