"""Available host memory is the least that the kernel and the control groups leave."""

from pathlib import Path

import pytest
from support.helpers import write_files

from lightning_vram.memory import host
from lightning_vram.memory.host import available_host_bytes, free_swap_bytes
from lightning_vram.memory.units import KIB, MIB

MEMINFO = {"proc/meminfo": "MemTotal:  4000 kB\nMemFree:  1 kB\nMemAvailable:    3000 kB\nHugePages_Total: 0\n"}


def test_this_machine_has_some() -> None:
    available = available_host_bytes()
    assert available is not None
    assert available > MIB


def test_without_limits_it_is_the_kernels_estimate(tmp_path: Path) -> None:
    root = write_files(tmp_path, MEMINFO | {"proc/self/cgroup": "0::/user\n", "sys/fs/cgroup/user/memory.max": "max\n"})
    assert available_host_bytes(root) == 3000 * KIB
    assert free_swap_bytes(root) == 0
    assert free_swap_bytes(write_files(tmp_path, {"proc/meminfo": "SwapTotal: 9 kB\nSwapFree:  7 kB\n"})) == 7 * KIB


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
