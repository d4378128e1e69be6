"""A rank's cores: its task's, or its share of what the process may use."""

from pathlib import Path

import pytest
from support.helpers import write_files

from lightning_vram.memory import host
from lightning_vram.memory.host import cores_of_rank

SLURM = ("CPUS_PER_TASK", "STEP_TASKS_PER_NODE", "NODEID", "CPU_BIND_TYPE")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 16 cores, without SLURM."""
    for name in SLURM:
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as torchrun does
    bind(monkeypatch, 16)


def bind(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)


def slurm(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)


@pytest.mark.parametrize(("ranks", "cores"), [(1, 16), (3, 5), (20, 1)])
def test_ranks_share_what_the_process_may_use(tmp_path: Path, ranks: int, cores: int):
    assert cores_of_rank(ranks, tmp_path) == cores


def test_where_the_system_does_not_tell_the_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(host.os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(host.os, "cpu_count", lambda: 12)
    assert cores_of_rank(2, tmp_path) == 6
    monkeypatch.setattr(host.os, "cpu_count", lambda: None)
    assert cores_of_rank(2, tmp_path) == 1


def test_a_slurm_task_has_its_cores_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    slurm(monkeypatch, CPUS_PER_TASK="4", STEP_TASKS_PER_NODE="2")
    assert cores_of_rank(2, tmp_path) == 4  # not bound: of 16
    bind(monkeypatch, 3)
    assert cores_of_rank(2, tmp_path) == 3


@pytest.mark.parametrize("step", [{"STEP_TASKS_PER_NODE": "1(x2)", "NODEID": "1"}, {}], ids=["srun", "batch script"])
def test_ranks_that_torchrun_starts_in_one_task_share_its_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: dict[str, str]
):
    slurm(monkeypatch, CPUS_PER_TASK="8", **step)
    assert cores_of_rank(4, tmp_path) == 2


@pytest.mark.parametrize(("node", "cores"), [("1", 5), ("2", 1), ("x", 1)])
def test_the_tasks_are_counted_on_this_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, cores: int):
    slurm(monkeypatch, CPUS_PER_TASK="5", STEP_TASKS_PER_NODE="4(x2),1", NODEID=node)
    assert cores_of_rank(4, tmp_path) == cores


@pytest.mark.parametrize(("binding", "cores"), [("mask_cpu:", 4), ("none", 2), ("", 2)])
def test_what_slurm_bound_a_task_to_is_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, binding: str, cores: int
):
    bind(monkeypatch, 4)
    slurm(monkeypatch, STEP_TASKS_PER_NODE="2", CPU_BIND_TYPE=binding)
    assert cores_of_rank(2, tmp_path) == cores


@pytest.mark.parametrize(("limit", "cores"), [("400000 100000\n", 2), ("50000 100000", 1), ("max 100000", 8)])
def test_the_quota_of_a_container_counts(tmp_path: Path, limit: str, cores: int):
    files = {"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/cpu.max": limit}
    assert cores_of_rank(2, write_files(tmp_path, files)) == cores


@pytest.mark.parametrize(("mount", "quota", "cores"), [("cpu", "300000\n", 3), ("cpu,cpuacct", "-1\n", 16)])
def test_quotas_of_the_first_version(tmp_path: Path, mount: str, quota: str, cores: int):
    group = f"sys/fs/cgroup/{mount}/slurm/job_1"
    files = {
        "proc/self/cgroup": f"9:memory:/x\n4:{mount}:/slurm/job_1\n",
        f"{group}/cpu.cfs_quota_us": quota,
        f"{group}/cpu.cfs_period_us": "100000\n",
    }
    assert cores_of_rank(1, write_files(tmp_path, files)) == cores


def test_a_count_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"^cores_of_rank\(local_world_size\) must be at least 1, got 0\.$"):
        cores_of_rank(0)
