"""Trainings that SLURM interrupts end with the weights of one that it does not. Real jobs of two nodes, on the CPU."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from slurm.cluster import Cluster
from slurm.training import OVER, PATIENCE, Training, assert_close

pytestmark = pytest.mark.timeout(600)  # several starts of Python and torch, on a machine that does other things, too

Whole = Callable[[str], Training]


@pytest.fixture(scope="module")
def whole(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """A training without a break, run once for each strategy."""
    trainings: dict[str, Training] = {}

    def run(strategy: str) -> Training:
        if strategy not in trainings:
            folder = tmp_path_factory.mktemp(strategy)
            training = Training(cluster, folder, "--strategy", strategy)
            assert training.end() == "COMPLETED", training.output
            trainings[strategy] = training
        return trainings[strategy]

    return run


def test_two_nodes_train_what_one_does(cluster: Cluster, whole: Whole, tmp_path: Path) -> None:
    (first, second) = (whole("sharded").events("start", rank)[0] for rank in (0, 1))
    assert first["environment"] == second["environment"] == "SLURMEnvironment"
    assert (first["world_size"], first["node_rank"], first["node"]) == (2, 0, "node1")
    assert (second["world_size"], second["node_rank"], second["node"]) == (2, 1, "node2")
    assert first["address"] == second["address"]
    options = ("--nodes=1", "--ntasks-per-node=2", "--cpus-per-task=2")
    one = Training(cluster, tmp_path / "one", "--strategy", "sharded", sbatch_options=options)
    assert one.end() == "COMPLETED", one.output
    assert {one.events("start", rank)[0]["node"] for rank in (0, 1)} == {one.events("start")[0]["node"]}
    assert_close(one.weights, whole("sharded").weights)


def test_a_signal_requeues_the_job_and_nothing_is_lost(cluster: Cluster, whole: Whole, tmp_path: Path) -> None:
    training = Training(cluster, tmp_path / "run", "--strategy", "sharded", "--num_workers", 1)
    for start in (1, 2):
        training.wait_for_start(start)
        time.sleep(random.random() * 0.3)  # the moment is what is tried
        cluster.signal(training.job, "USR1")
    assert training.end() == "COMPLETED", training.output
    assert cluster.restarts(training.job) == 2
    stops = [[event["step"] for event in training.events("stop", rank)] for rank in (0, 1)]
    assert stops[0] == stops[1] == [event["step"] for event in training.events("start")][1:]
    assert_close(training.weights, whole("sharded").weights, tolerance=0)
    assert not (tmp_path / "run" / "slurm_requeue").exists()


def test_a_time_limit_is_told_and_gone_on_from(cluster: Cluster, whole: Whole, tmp_path: Path) -> None:
    limits = ("--time=1", "--signal=USR1@30")  # minutes, and the shortest notice of a SLURM that looks every 30 s
    training = Training(cluster, tmp_path / "run", "--step_seconds", 1, sbatch_options=limits)  # 120 of them
    training.wait_for_start(2)
    # a busy machine might need all of one minute for each start
    cluster.run("scontrol", "update", f"jobid={training.job}", "timelimit=30")
    assert training.end() == "COMPLETED", training.output
    assert cluster.restarts(training.job) == len(training.events("stop")) > 0
    assert f"SlurmRequeue: SIGUSR1 at step {training.events('stop')[0]['step']}: " in training.output
    assert_close(training.weights, whole("ddp").weights, tolerance=0)


def test_an_element_of_an_array_comes_back_alone(cluster: Cluster, whole: Whole, tmp_path: Path) -> None:
    one_by_one = ("--array=0-1%1",)  # both in one folder: neither may take the other's checkpoint for its own
    training = Training(cluster, tmp_path / "run", "--step_seconds", 0.02, sbatch_options=one_by_one)
    training.wait_for_start()
    cluster.signal(f"{training.job}_0", "USR1")
    training.wait_for_start(3)
    ends = [cluster.wait(f"{training.job}_{element}", *OVER, timeout=PATIENCE) for element in (0, 1)]
    assert ends == ["COMPLETED", "COMPLETED"], training.output
    assert [cluster.restarts(f"{training.job}_{element}") for element in (0, 1)] == [1, 0]
    (stop,) = training.events("stop")
    starts = sorted((event["restart"], event["step"]) for event in training.events("start"))
    assert starts == [("0", 0), ("0", 0), ("1", stop["step"])]
    assert_close(training.weights, whole("ddp").weights, tolerance=0)


def test_a_job_that_is_preempted_comes_back(cluster: Cluster, whole: Whole, tmp_path: Path) -> None:
    script = tmp_path / "urgent.sh"
    script.write_text("#!/bin/bash\nexit 0\n")
    low = Training(cluster, tmp_path / "low", "--strategy", "sharded", sbatch_options=("--partition=low",))
    low.wait_for_start()
    urgent = cluster.submit(script, "--partition=high", "--nodes=2", "--exclusive", f"--output={tmp_path}/urgent")
    assert cluster.wait(urgent, "COMPLETED", "FAILED", timeout=PATIENCE) == "COMPLETED"
    assert low.end() == "COMPLETED", low.output
    assert f"SlurmRequeue: SIGTERM at step {low.events('stop')[0]['step']}: " in low.output
    assert [event["step"] for event in low.events("start")][1:] == [event["step"] for event in low.events("stop")]
    assert_close(low.weights, whole("sharded").weights, tolerance=0)


def test_a_job_that_is_cancelled_stays_so(cluster: Cluster, tmp_path: Path) -> None:
    training = Training(cluster, tmp_path / "run", "--max_steps", 100_000)
    training.wait_for_start()
    cluster.run("scancel", str(training.job))
    assert training.end() == "CANCELLED"
    assert f"job {training.job} was cancelled and is not requeued." in training.output
    assert cluster.restarts(training.job) == 0


def test_a_rank_that_is_killed_ends_the_job_with_our_message_and_the_next_one_goes_on(
    cluster: Cluster, whole: Whole, tmp_path: Path
) -> None:
    options = ("--strategy", "sharded", "--save_every", 20)
    # longer than srun needs to end the other task
    killed = Training(cluster, tmp_path / "run", *options, "--die_at", 50, "--clear_up_seconds", 1)
    assert killed.end() == "FAILED"
    (death,) = killed.events("die", rank=1)
    (error,) = killed.events("stop")
    assert error["time"] - death["time"] < 20
    assert error["error"].startswith("LostPeerError: Rank 0 of 2 on ")
    assert ", step " in error["error"]
    assert f"\n{error['error'].removeprefix('LostPeerError: ')}\n" in killed.output  # at once
    assert error["error"] in killed.output  # the traceback
    again = Training(cluster, tmp_path / "run", *options)
    assert again.end() == "COMPLETED", again.output
    assert again.events("start")[-1]["step"] == 40
    assert_close(again.weights, whole("sharded").weights, tolerance=0)


def test_a_node_that_is_lost_and_comes_back(cluster: Cluster, whole: Whole, tmp_path: Path) -> None:
    training = Training(cluster, tmp_path / "run", "--save_every", 20, "--step_seconds", 0.2)
    saved = tmp_path / "run" / "checkpoints" / "last.ckpt"
    cluster.wait_until(saved.exists, training.job, PATIENCE, "saved nothing")
    cluster.kill("node2")
    cluster.wait_until(lambda: cluster.restarts(training.job) == 1, training.job, 150, "was not requeued")
    cluster.start("node2")
    assert training.end() == "COMPLETED", training.output
    assert training.events("start")[-1]["step"] >= 20
    assert_close(training.weights, whole("ddp").weights, tolerance=0)
