"""What the kernel and the control groups leave: host memory, cores of a rank, nodes, and the machine's name."""

import socket
from pathlib import Path

import pytest
from support.helpers import write_files

from lightning_vram.memory import host
from lightning_vram.memory.host import (
    available_host_bytes,
    cores_by_node,
    cores_of_rank,
    free_swap_bytes,
    machine_name,
    node_of_pci_device,
)
from lightning_vram.memory.units import KIB, MIB

MEMINFO = {"proc/meminfo": "MemTotal:  4000 kB\nMemFree:  1 kB\nMemAvailable:    3000 kB\nHugePages_Total: 0\n"}

VM_STAT = """#!/bin/sh
cat <<END
Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                                1000.
Pages active:                              9000.
Pages inactive:                             300.
Pages speculative:                           20.
Pages wired down:                          5000.
END
"""


def test_this_machine_has_some() -> None:
    available = available_host_bytes()
    assert available is not None
    assert available > MIB


def test_without_limits_it_is_the_kernels_estimate(tmp_path: Path) -> None:
    root = write_files(tmp_path, MEMINFO | {"proc/self/cgroup": "0::/user\n", "sys/fs/cgroup/user/memory.max": "max\n"})
    assert available_host_bytes(root) == 3000 * KIB
    assert free_swap_bytes(root) == 0
    assert free_swap_bytes(write_files(tmp_path, {"proc/meminfo": "SwapTotal: 9 kB\nSwapFree:  7 kB\n"})) == 7 * KIB


def test_on_macos_inactive_pages_are_available(tmp_path: Path) -> None:
    root = write_files(tmp_path, {"usr/bin/vm_stat": VM_STAT})
    (root / "usr/bin/vm_stat").chmod(0o755)
    assert available_host_bytes(root) == (1000 + 300 + 20) * 16384


def test_a_limit_of_a_group_or_of_one_around_it_counts_without_what_is_cache(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/job/step"
    files = {
        "proc/self/cgroup": "0::/job/step\n",
        f"{group}/memory.max": f"{900 * KIB}\n",
        f"{group}/memory.current": f"{500 * KIB}\n",
        f"{group}/memory.stat": f"anon 5\ninactive_file {100 * KIB}\nactive_file {40 * KIB}\n",
    }
    root = write_files(tmp_path, MEMINFO | files)
    assert available_host_bytes(root) == (400 + 100 + 20) * KIB  # half of the cache that was used again
    outer = {"sys/fs/cgroup/job/memory.max": "1000", "sys/fs/cgroup/job/memory.current": "1500"}
    assert available_host_bytes(write_files(root, outer)) == 0


def test_groups_of_the_first_version(tmp_path: Path) -> None:
    mount = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "9:name=systemd:/x\n4:cpu,memory:/slurm/job_1\n",
        f"{mount}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{mount}/memory.usage_in_bytes": "100\n",
        f"{mount}/slurm/job_1/memory.limit_in_bytes": "5000\n",
        f"{mount}/slurm/job_1/memory.usage_in_bytes": "2000\n",
        f"{mount}/slurm/job_1/memory.stat": "total_inactive_file 300\n",
    }
    assert available_host_bytes(write_files(tmp_path, MEMINFO | files)) == 3300


def test_a_group_that_the_container_does_not_show_is_the_mount_itself(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/docker/abc\n",
        "sys/fs/cgroup/memory.max": "700",
        "sys/fs/cgroup/memory.current": "600",
    }
    assert available_host_bytes(write_files(tmp_path, MEMINFO | files)) == 100


def test_without_proc_the_c_library_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host.os, "sysconf_names", {"SC_PHYS_PAGES": 1})
    monkeypatch.setattr(host.os, "sysconf", {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert available_host_bytes(tmp_path) == 40960
    monkeypatch.setattr(host.os, "sysconf_names", {})
    assert available_host_bytes(tmp_path) is None


def test_a_group_is_not_used_beyond_where_it_is_slowed_down(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": "max",
        "sys/fs/cgroup/memory.high": "3200",
        "sys/fs/cgroup/memory.current": "3100",
    }
    root = write_files(tmp_path, MEMINFO | files)
    assert available_host_bytes(root) == 100
    assert available_host_bytes(write_files(root, {"sys/fs/cgroup/memory.max": "3150"})) == 50


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
def test_ranks_that_torchrun_starts_in_one_task_share_its_cores(tmp_path, monkeypatch, step: dict[str, str]):
    slurm(monkeypatch, CPUS_PER_TASK="8", **step)
    assert cores_of_rank(4, tmp_path) == 2


@pytest.mark.parametrize(("node", "cores"), [("1", 5), ("2", 1), ("x", 1)])
def test_the_tasks_are_counted_on_this_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, node: str, cores: int):
    slurm(monkeypatch, CPUS_PER_TASK="5", STEP_TASKS_PER_NODE="4(x2),1", NODEID=node)
    assert cores_of_rank(4, tmp_path) == cores


@pytest.mark.parametrize(("binding", "cores"), [("mask_cpu:", 4), ("none", 2), ("", 2)])
def test_what_slurm_bound_a_task_to_is_its_own(tmp_path, monkeypatch, binding: str, cores: int):
    bind(monkeypatch, 4)
    slurm(monkeypatch, STEP_TASKS_PER_NODE="2", CPU_BIND_TYPE=binding)
    assert cores_of_rank(2, tmp_path) == cores


@pytest.mark.parametrize(("limit", "cores"), [("400000 100000\n", 2), ("50000 100000", 1), ("max 100000", 8)])
def test_the_quota_of_a_container_counts(tmp_path: Path, limit: str, cores: int):
    files = {"proc/self/cgroup": "0::/docker/abc\n", "sys/fs/cgroup/cpu.max": limit}
    assert cores_of_rank(2, write_files(tmp_path, files)) == cores


def test_a_count_that_is_none_is_refused():
    with pytest.raises(ValueError, match=r"^cores_of_rank\(local_world_size\) must be at least 1, got 0\.$"):
        cores_of_rank(0)


def write_machine(root: Path, boot: str, container: str) -> Path:
    (root / "proc/self/ns").mkdir(parents=True)
    (root / "proc/self/ns/mnt").symlink_to(container)
    return write_files(root, {"proc/sys/kernel/random/boot_id": f"{boot}\n"})


def test_machines_of_one_name_and_containers_of_one_machine_are_told_apart(tmp_path: Path) -> None:
    roots = [("a", "mnt:[1]"), ("a", "mnt:[2]"), ("b", "mnt:[1]")]
    names = [machine_name(write_machine(tmp_path / str(i), *root)) for i, root in enumerate(roots)]
    assert names == [(socket.gethostname(), *root) for root in roots]


NODES = "sys/devices/system/node"
TWO_SOCKETS = {
    f"{NODES}/node0/cpulist": "0-1,4-5\n",
    f"{NODES}/node1/cpulist": "2-3,6\n",
    f"{NODES}/node2/cpulist": "\n",  # memory alone
    f"{NODES}/possible": "0-2\n",
    "sys/bus/pci/devices/0000:3b:00.0/numa_node": "1\n",
    "sys/bus/pci/devices/0000:04:00.0/numa_node": "-1\n",
}


def test_cores_of_nodes_that_have_some(tmp_path: Path) -> None:
    assert cores_by_node(write_files(tmp_path, TWO_SOCKETS)) == {0: {0, 1, 4, 5}, 1: {2, 3, 6}}


def test_a_system_that_does_not_tell_has_no_nodes(tmp_path: Path) -> None:
    assert cores_by_node(tmp_path) == {}
    assert node_of_pci_device("0000:3b:00.0", tmp_path) is None


@pytest.mark.parametrize(("address", "node"), [("0000:3b:00.0", 1), ("0000:04:00.0", None), ("0000:05:00.0", None)])
def test_the_node_of_a_device(tmp_path: Path, address: str, node: int | None) -> None:
    assert node_of_pci_device(address, write_files(tmp_path, TWO_SOCKETS)) == node
