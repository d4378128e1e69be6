"""The cluster that other tests rely on, and what SLURM does on it that our code relies on. Jobs are bash alone."""

import os
import signal
from pathlib import Path

import pytest
from slurm.cluster import Cluster, read_environments
from slurm.node_namespaces import NamespaceCluster

TWO_NODES = ("--nodes=2", "--ntasks-per-node=1")
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


def waiting_job(folder: Path) -> Path:
    """It waits until it is started a second time."""
    task = write_task(
        folder, "echo start $SLURM_PROCID ${SLURM_RESTART_COUNT:-0}", "(($SLURM_RESTART_COUNT)) || sleep 60"
    )
    return write_job(folder, task)


def trap(who: str) -> str:
    return "; ".join(f"trap 'echo {who} got {name}' {name}" for name in ("USR1", "TERM"))


def processes_of(cluster: Cluster) -> list[int]:
    conf = str(cluster.configuration)
    return [process for process, variables in read_environments() if variables.get("SLURM_CONF") == conf]


def network_of(process: int) -> str:
    try:
        return os.readlink(f"/proc/{process}/ns/net")
    except OSError:  # it has ended
        return ""


# --- the cluster


def test_all_nodes_are_idle(cluster):
    assert [cluster.node_state(node) for node in ("node1", "node2")] == ["idle", "idle"]


def test_two_clusters_at_once_do_not_clash(cluster, tmp_path):
    script = write_job(tmp_path, "echo $SLURM_CLUSTER_NAME")
    with Cluster(num_nodes=1) as other:
        for each, name in ((cluster, "one.out"), (other, "other.out")):
            job = each.submit(script, f"--output={name}")
            assert each.wait(job, "COMPLETED", "FAILED") == "COMPLETED"
    names = [(tmp_path / name).read_text().strip() for name in ("one.out", "other.out")]
    assert names == [cluster.folder.name, other.folder.name]


def test_an_outer_job_is_not_seen_by_ours(cluster, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SBATCH_PARTITION", "elsewhere")
    assert {name for name in cluster.environment if name.startswith(("SLURM", "SBATCH"))} == {"SLURM_CONF"}


def test_the_end_ends_jobs_daemons_and_folder(tmp_path):
    task = write_task(tmp_path, "trap '' TERM", "setsid sleep 61 & echo start", "sleep 61")
    with Cluster(num_nodes=1) as cluster:
        job = cluster.submit(write_job(tmp_path, task))
        cluster.wait_for_output(job, "start")
        assert processes_of(cluster)
    assert not processes_of(cluster)
    assert not cluster.folder.exists()


def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing():
    cluster = Cluster(settings={"SelectType": "select/none_such"})
    with pytest.raises(RuntimeError, match=r"(?s)did not become idle.*--- slurmctld\.log.*select/none_such"), cluster:
        pass
    assert not processes_of(cluster)
    assert not cluster.folder.exists()


def test_waiting_in_vain_shows_the_output_and_the_log(cluster, tmp_path):
    job = cluster.submit(write_job(tmp_path, "echo found nothing"))
    with pytest.raises(AssertionError, match=r"(?s)never was in state FAILED in 1 s.*found nothing.*slurmctld\.log"):
        cluster.wait(job, "FAILED", timeout=1)


# --- jobs


@pytest.mark.parametrize(("code", "state"), [(0, "COMPLETED"), (3, "FAILED")])
def test_the_exit_code_of_a_task_decides_the_state(cluster, tmp_path, code, state):
    task = write_task(tmp_path, "echo rank $SLURM_PROCID on $SLURMD_NODENAME", f"exit $((SLURM_PROCID * {code}))")
    job = cluster.submit(write_job(tmp_path, task), *TWO_NODES)
    assert cluster.wait(job, "COMPLETED", "FAILED") == state
    assert cluster.describe(job)["ExitCode"] == f"{code}:0"
    ranks = [line for line in cluster.output(job).splitlines() if line.startswith("rank")]
    assert sorted(ranks) == ["rank 0 on node1", "rank 1 on node2"]


def test_arguments_and_variables_reach_the_job(cluster, tmp_path):
    job = cluster.submit(write_job(tmp_path, "echo $1-$2-$COLOR"), env={"COLOR": "red"}, args=(1, "two"))
    cluster.wait(job, "COMPLETED")
    assert cluster.output(job) == "1-two-red\n"


def test_one_rank_can_be_killed(cluster, tmp_path):
    task = write_task(tmp_path, "sleep 60 &> /dev/null & echo start $SLURM_PROCID", "wait")
    job = cluster.submit(write_job(tmp_path, task.replace("srun", "srun --kill-on-bad-exit")), *TWO_NODES)
    cluster.wait_for_output(job, "start 0")
    cluster.wait_for_output(job, "start 1")
    (task_process,) = cluster.processes(job, rank=1)
    assert cluster.processes(job, node="node2") == [task_process]
    assert len(cluster.processes(job)) == 2
    os.kill(task_process, signal.SIGKILL)
    assert cluster.wait(job, "FAILED") == "FAILED"
    assert cluster.describe(job)["ExitCode"] in ("137:0", "143:0")  # of the rank, or of the other one, which srun ends


def test_an_impossible_job_is_refused(cluster, tmp_path):
    with pytest.raises(RuntimeError, match=r"^sbatch .*: Node count specification invalid$"):
        cluster.submit(write_job(tmp_path, "true"), "--nodes=3")


# --- signals


@pytest.mark.parametrize(
    ("options", "receivers"),
    [
        ((), {"task", "child", "session"}),
        (("--batch",), {"batch"}),
    ],
)
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


@pytest.mark.parametrize(("sends_own", "name"), [(True, "USR1"), (False, "TERM")])
def test_preemption_announces_itself_and_requeues(tmp_path, sends_own, name):
    task = write_task(tmp_path, trap("task"), "echo start $SLURM_RESTART_COUNT", WAIT)
    (tmp_path / "urgent").mkdir()
    urgent_script = write_job(tmp_path / "urgent", "sleep 60")
    with Cluster(1, kill_wait=1, grace_time=1, preempt_send_user_signal=sends_own) as cluster:
        job = cluster.submit(write_job(tmp_path, task), "--partition=low", "--signal=USR1@60", "--exclusive")
        cluster.wait_for_output(job, "start")
        cluster.submit(urgent_script, "--partition=high", "--exclusive")
        output = cluster.wait_for_output(job, "task got")
        assert output.partition("task got ")[2].split()[0] == name
        if sends_own:  # the other waits no less
            cluster.wait_until(lambda: cluster.restarts(job) == 1, job, 30, "was not requeued")


# --- restarts and faults


def test_a_requeued_job_starts_again_within_seconds(cluster, tmp_path):
    job = cluster.submit(waiting_job(tmp_path))
    cluster.wait_for_output(job, "start 0 0")
    cluster.requeue(job)
    cluster.wait(job, "PENDING")
    cluster.wait(job, "COMPLETED", timeout=40)
    assert cluster.restarts(job) == 1
    assert "start 0 1" in cluster.output(job)


def test_a_job_outlives_a_crash_of_slurmd(cluster, tmp_path):
    task = write_task(tmp_path, "echo start", f"until [ -e {tmp_path}/go ]; do sleep 0.1; done")
    job = cluster.submit(write_job(tmp_path, task))
    cluster.wait_for_output(job, "start")
    cluster.kill_slurmd("node1")
    cluster.start_slurmd("node1")
    (tmp_path / "go").touch()
    cluster.wait(job, "COMPLETED")


def test_a_job_outlives_a_crash_of_slurmctld(cluster, tmp_path):
    task = write_task(tmp_path, "echo start", f"until [ -e {tmp_path}/go ]; do sleep 0.1; done")
    job = cluster.submit(write_job(tmp_path, task))
    cluster.wait_for_output(job, "start")
    cluster.wait_until_saved(job)
    cluster.kill_slurmctld()
    (tmp_path / "go").touch()
    cluster.start_slurmctld()
    cluster.wait(job, "COMPLETED")


# --- machines


def test_a_power_failure_requeues_the_job(namespace_cluster, tmp_path):
    job = namespace_cluster.submit(waiting_job(tmp_path), *TWO_NODES)
    namespace_cluster.wait_for_output(job, "start 1 0")
    namespace_cluster.power_off("node2")
    namespace_cluster.wait(job, "PENDING")
    assert namespace_cluster.node_state("node2") == "down*"
    namespace_cluster.power_on("node2")
    namespace_cluster.wait(job, "COMPLETED")
    assert namespace_cluster.restarts(job) == 1


def test_a_short_loss_of_the_network_does_no_harm(namespace_cluster, tmp_path):
    task = write_task(
        tmp_path, "echo $(hostname) is $SLURMD_NODENAME", f"until [ -e {tmp_path}/go ]; do sleep 0.1; done"
    )
    job = namespace_cluster.submit(write_job(tmp_path, task), *TWO_NODES)
    namespace_cluster.wait_for_output(job, "node2 is node2")
    namespace_cluster.unplug("node2")
    (tmp_path / "go").touch()
    namespace_cluster.plug("node2")
    namespace_cluster.wait(job, "COMPLETED")
    assert namespace_cluster.restarts(job) == 0


def test_machines_end_with_their_cluster(namespace_cluster, tmp_path):
    """Of another cluster than that of the fixture, whose addresses are the same."""
    with NamespaceCluster(num_nodes=1) as cluster:
        job = cluster.submit(waiting_job(tmp_path))
        cluster.wait_for_output(job, "start 0 0")
        networks = {network_of(process) for process in processes_of(cluster)}
        assert len(networks) == 3, "munged is in ours, the others in one per machine"
    assert not processes_of(cluster)
    assert not cluster.folder.exists()
    theirs = networks - {network_of(os.getpid())}
    processes = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    assert not [process for process in processes if network_of(process) in theirs]
